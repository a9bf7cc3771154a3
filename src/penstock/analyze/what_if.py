"""What would help, each tried by simulation: what a step would take, and how many times as fast that is.

Packing, even cuts and healthy workers are tried on the whole recorded steps, collectives and all. Other orders,
dispatch and assignments are tried on the pipelines of some steps: what the slowest replica takes, the step takes.
Schedules, links, channels and cuts in whole layers are tried by a `StepModel`, in the table of an analysis as by
`predict`, so that both say the same:

    trace of 1f1b --> ms of each op, ms between ops, ms of each link --> simulate zb over gloo --> 812 ms, 795 to 829

The ops of a step are drawn from the recorded steps many times, each microbatch's from one of them. The middle of the
simulated times is the prediction, and their spread and the model's own error are its error bar. The order that ran is
simulated alike. The time by which recorded steps differ from that, as by late starts, is added to what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from penstock.analyze.causes import Effects
from penstock.analyze.fitted_pipelines import FittedPipelines, fitted, layer_times, most_held
from penstock.analyze.replay import ReplayedRun
from penstock.cost import Costs, Links
from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.formats.traces import TraceError
from penstock.library.registry import build, buildable
from penstock.passes import add_communication
from penstock.planning import order_microbatches
from penstock.planning.batches import assign_evenly
from penstock.schedule import Schedule, check
from penstock.schedule.messages import BUFFERED, GLOO, has_communication, remove_communication, require_channel
from penstock.simulation import simulate

if TYPE_CHECKING:
    from penstock.analyze.run_analysis import RunAnalysis

MOST_STEPS = 3
"""Steps whose pipelines are simulated: those whose times lie evenly among all."""
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "zb", "v-half")
DEALT = "microbatches dealt out to replicas by their work"
DRAWS, FEWEST_DRAWS = 20, 5
"""Steps that are drawn for a prediction, of all replicas together, and the fewest of each."""
SMALLEST_REST = 1e-4
"""Share of a step below which a time that stays is not told."""
MODEL_ERROR = 0.02
"""Share by which a prediction may be wrong besides the spread of steps. `benchmarks/arrive` measures it, on gloo."""
HALVES = (0.4, 0.6)
"""Between which shares of a whole backward I may take, where no op shows it."""


@dataclass(frozen=True)
class WhatIf:
    """One change and what it would give.

    Attributes:
        kind: "packing", "workers", "cut", "dispatch", "order", "assignment", "schedule" or "try".
        what: the change in words.
        time: ms of a step then, launch delays as they were.
        speedup: how many times as fast; below 1 it is slower.
        memory: most activations that a rank holds then, in its share of the model's, where that changes.
        bar: ms between which the step is expected, where that is known.
        assumed: what the change takes for granted, in sentences.

    Examples:
        >>> import penstock as ps
        >>> one = ps.analyze.WhatIf("dispatch", "run hinted", time=400.0, speedup=1.1)
        >>> one.speedup > 1
        True
    """

    kind: str
    what: str
    time: float
    speedup: float
    memory: float | None = None
    bar: tuple[float, float] | None = None
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        found = asdict(self)
        renamed = {"time": "time_ms", "memory": "in_flight", "bar": "bar_ms"}
        return {renamed.get(name, name): value for name, value in found.items()}


def what_ifs(
    run: ReplayedRun, effects: Effects, fit: FittedPipelines | None, layers: Sequence[int] = ()
) -> tuple[WhatIf, ...]:
    """All of them, the greatest gain first.

    Args:
        layers: of each stage, in order; then a better cut is one that can be made.
    """
    measured = float(run.measured.mean())
    # Where steps ran several orders, no cut of whole layers can be simulated: the even cut says what is to be gained.
    whole = _whole_steps(run, effects, () if fit is None else layers)
    tried = [*whole, *([] if fit is None else _pipelines(run, fit))]
    found = [WhatIf(kind, what, measured - won, measured / (measured - won)) for kind, what, won in tried]
    if fit is not None:
        found += _schedules(run, effects, fit, layers)
    return tuple(sorted(found, key=lambda each: -each.speedup))


Tried = tuple[str, str, float]
"""A change: its kind, the change in words, and by how many ms a step is shorter then."""


def _whole_steps(run: ReplayedRun, effects: Effects, layers: Sequence[int]) -> Iterator[Tried]:
    """Changes to what the parts of whole steps take."""

    def without(factor: Array) -> float:
        return run.won(effects.without(run.own, factor))

    yield "packing", "microbatches packed so that all take as long", without(effects.microbatch)
    if (effects.worker > 1).any():
        yield "workers", "every rank as fast as its like", without(np.maximum(effects.worker, 1.0))
    num_stages = run.table.trace.num_stages
    if num_stages < 2:
        return
    work = np.nansum(effects.by_stage, axis=0)
    if not layers:  # else a cut that can be made is tried
        move = 1 - work.mean() / work.max()
        what = f"an even cut: {move:.0%} of stage {int(np.argmax(work))}'s work moved to other stages"
        yield "cut", what, without(effects.stage)


def better_cut(work: Array, layers: Sequence[int]) -> list[int]:
    """The layers of each stage with which the longest is shortest.

    A layer takes what `layer_times` says, and what stages take beyond that stays where it is.

    Args:
        work: ms of a microbatch by stage. layers: of each stage now.
    """
    each, beyond = layer_times(work, layers)
    found = [1 if count else 0 for count in layers]
    for _ in range(sum(layers) - sum(found)):
        least = min(range(len(found)), key=lambda stage: (beyond[stage] + (found[stage] + 1) * each, stage))
        found[least] += 1
    return found


def _pipelines(run: ReplayedRun, fit: FittedPipelines) -> Iterator[Tried]:
    """Changes to dispatch, to the order of microbatches and to their assignment to replicas."""
    order = np.argsort(run.replayed, kind="stable")
    steps = [int(order[round(q)]) for q in np.linspace(0, len(order) - 1, min(MOST_STEPS, len(order)) + 2)[1:-1]]
    own = [[fit.costs(step, replica) for replica in range(fit.num_replicas)] for step in steps]

    def frozen(costs: Costs, dispatch: str = "frozen") -> float:
        return simulate(fit.schedule, costs, links=fit.links, dispatch=dispatch).makespan

    def ordered(costs: Costs) -> float:
        return order_microbatches(fit.schedule, costs, links=fit.links).makespan

    def longest(time: Callable[[Costs], float], costs: Sequence[Sequence[Costs]] = own) -> float:
        """Mean over the steps of what the slowest replica takes."""
        return float(np.mean([max(map(time, of_step)) for of_step in costs]))

    before = longest(frozen)
    hinted = longest(lambda costs: min(frozen(costs), frozen(costs, "hinted")))
    yield "dispatch", "whatever op is ready first (hinted dispatch), where that is faster", before - hinted
    is_free = not fit.schedule.microbatch_orders
    if is_free:
        yield "order", "each replica's microbatches in the best order, their lengths known", before - longest(ordered)
    if fit.num_replicas > 1:
        dealt = [_dealt(fit, step) for step in steps]
        yield "assignment", DEALT, before - longest(frozen, dealt)
        if is_free:
            yield "assignment", f"{DEALT}, then in the best order", before - longest(ordered, dealt)


def _schedules(run: ReplayedRun, effects: Effects, fit: FittedPipelines, layers: Sequence[int]) -> Iterator[WhatIf]:
    """Other schedules, and a better cut in whole layers."""
    ran = StepModel(run, fit, fit.schedule)
    if len(layers) > 1:
        better = better_cut(np.nansum(effects.by_stage, axis=0), layers)
        what = f"layers {', '.join(map(str, better))} to the stages instead of {', '.join(map(str, layers))}"
        found = replace(ran, cut=better, layers=layers).predicted(ran.unexplained)
        yield replace(found, kind="cut", what=what, memory=None)
    for schedule in _others(fit):
        what = f"{schedule.name} instead of {fit.name}"
        if "B" in fit.times and schedule.splits_backward():
            what += ", a backward's two halves taking half of it each"
        yield replace(replace(ran, schedule=schedule).predicted(ran.unexplained), kind="schedule", what=what)


def _others(fit: FittedPipelines) -> Iterator[Schedule]:
    """Other schedules that hold no more than the recorded one did."""
    ranks, num = fit.schedule.num_ranks, fit.schedule.num_microbatches
    if fit.schedule.num_stages != ranks:
        return  # how a rank's stages would be laid out anew is not known
    for name, schedule in buildable(SCHEDULES, ranks, num):
        fits = most_held(schedule) <= fit.in_flight * (1 + EPSILON)
        if name != fit.name and schedule.placement.num_pipelines == 1 and fits:
            yield replace(schedule, name=name)


def _dealt(fit: FittedPipelines, step: int) -> list[Costs]:
    """The costs of each replica once microbatches are dealt out by their work, as many to each as before."""
    factors = fit.factors[step]
    dealt = assign_evenly(factors.ravel(), len(factors))
    found = []
    for replica, chosen in enumerate(dealt):
        by = np.sort(factors.ravel()[chosen])
        by = by[np.argsort(np.argsort(factors[replica], kind="stable"), kind="stable")]
        scale = by / factors[replica]
        found.append(fit.costs(step, replica, scale))
    return found


def predict(
    found: RunAnalysis,
    schedule: Schedule | str | None = None,
    *,
    links: Links | None = None,
    channels: str = BUFFERED,
    cut: Sequence[int] = (),
    layers: Sequence[int] = (),
    message_bytes: float = 0.0,
) -> WhatIf:
    """What a step would take with another schedule, cut, link or channel than the recorded ones.

    Args:
        found: the analysis of the trace.
        schedule: a schedule for the recorded ranks and microbatches, or a library schedule's name. Default: the
            recorded order.
        links: what these links would do, in place of what the trace shows of them.
        channels: what carries the messages: "buffered", "gloo", "nccl", "nccl-pair" or "nccl-edge". With others than
            "buffered" messages stand where the schedule has them, or where `passes.add_communication` puts them.
        cut: how many layers each stage of the schedule has. Without a cut, and if it has more or fewer stages than
            the recorded one, these are divided, or put together, in equal parts.
        layers: how many layers each recorded stage has, for a cut.
        message_bytes: of one activation, for links with a bandwidth.

    Raises:
        TraceError: ranks did not run one order of F, B, I and W in all steps, or layers and cut do not fit the
            stages.
        ScheduleError: no such schedule or channel, or one for other ranks or microbatches.

    Examples:
        >>> import penstock as ps
        >>> import csv, pathlib, tempfile
        >>> from penstock.formats.traces import read_trace
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> costs = ps.Costs.uniform(2, f=10, i=10, w=10)
        >>> t = ps.simulate(ps.build("1f1b", 2, 4), costs)
        >>> rows = [(o.op.kind, o.op.stage, o.op.microbatch, o.rank, 0, o.start, o.end) for o in t.ops]
        >>> with path.open("w", newline="") as file:
        ...     csv.writer(file).writerows([("op", "stage", "microbatch", "rank", "step", "start", "end"), *rows])
        >>> found = ps.analyze.analyze_trace(read_trace([str(path)]))
        >>> zb = ps.analyze.predict(found, "zb-h1", links=ps.Links({(0, 1): 5.0}))
        >>> zb.time == ps.simulate(ps.build("zb-h1", 2, 4), costs, links=ps.Links({(0, 1): 5.0})).makespan
        True
    """
    fit = found.fit or fitted(found.run, found.effects)  # which says why there is none
    require_channel(channels)
    if schedule is None:
        schedule = fit.schedule
    elif isinstance(schedule, str):
        schedule = build(schedule, fit.schedule.num_ranks, fit.schedule.num_microbatches)
    check(schedule)
    _require_fit(found.name, fit.schedule, schedule, layers, cut)
    if links is not None and not message_bytes and any(each.bandwidth for each in links.conditions.values()):
        raise TraceError(
            "a link with a bandwidth needs the bytes of a message: give a delay alone, or message_bytes to "
            "penstock.analyze.predict"
        )
    model = StepModel(found.run, fit, schedule, links, channels, cut, layers if cut else (), message_bytes)
    return model.predicted(StepModel(found.run, fit, fit.schedule).unexplained)


@dataclass(frozen=True)
class StepModel:
    """A step of the recorded ranks and microbatches, simulated with the recorded ops.

    Attributes:
        run, fit: the recorded steps, and their pipelines.
        schedule: what runs in the step. links, channels, cut, layers, message_bytes: as for `predict`; `layers` with
            a cut alone.
    """

    run: ReplayedRun
    fit: FittedPipelines
    schedule: Schedule
    links: Links | None = None
    channels: str = BUFFERED
    cut: Sequence[int] = ()
    layers: Sequence[int] = ()
    message_bytes: float = 0.0

    @cached_property
    def measured(self) -> float:
        """Ms of a recorded step, the mean."""
        return float(self.run.measured.mean())

    @cached_property
    def is_in_torch(self) -> bool:
        """Whether messages are ops, and the first stage's I does nothing."""
        return self.channels != BUFFERED

    @cached_property
    def drawn(self) -> list[float]:
        """Ms of each drawn step, in which each microbatch's ops are those of one of the recorded steps."""
        num_steps, num = len(self.run.table.steps), self.fit.schedule.num_microbatches
        random = np.random.default_rng(0)
        num_draws = max(FEWEST_DRAWS, DRAWS // self.fit.num_replicas) if num_steps > 1 else 1
        return [self._time(random.integers(num_steps, size=num)) for _ in range(num_draws)]

    @cached_property
    def unexplained(self) -> float:
        """Ms by which recorded steps are longer than this one; that of what ran in them, if this is its model."""
        return self.measured - median(self.drawn)

    @cached_property
    def besides(self) -> float:
        """Ms of a step before the first op of a microbatch and after the last: collectives, the optimizer."""
        table = self.run.table
        span = table.end[:, table.compute].max(axis=1) - table.start[:, table.compute].min(axis=1)
        return float((self.run.measured - span).mean())

    def predicted(self, unexplained: float) -> WhatIf:
        """What the step would take, within which error bar, and what that takes for granted.

        Args:
            unexplained: that of the model of what ran.
        """
        placed = self._placed()
        # Where messages stood in the recorded run is not known, so that run cannot be simulated on torch's channels.
        rest = self.besides if self.is_in_torch else unexplained
        time = median(placed.drawn)
        low, high = np.quantile(placed.drawn, [0.05, 0.95])
        is_halved = "I" not in self.fit.times and self.schedule.splits_backward()
        if is_halved:
            ends = [time - placed._time(self._middle) + placed._time(self._middle, share) for share in HALVES]
            low, high = min(low, *ends), max(high, *ends)
        return WhatIf(
            "try",
            self.schedule.name,
            time + rest,
            self.measured / (time + rest),
            most_held(remove_communication(self.schedule)),
            (float(low) * (1 - MODEL_ERROR) + rest, float(high) * (1 + MODEL_ERROR) + rest),
            self._assumed(placed is self, rest, is_halved),
        )

    @property
    def _middle(self) -> Array:
        """The step whose time is the middle one."""
        return np.argsort(self.run.replayed, kind="stable")[len(self.run.table.steps) // 2]

    @cached_property
    def _links(self) -> Links:
        """The given links, and what the trace shows of the others; the middle of these for links without messages."""
        fit, given = self.fit, self.links
        # A receiver takes the time between ops too, and its ops have it.
        shown = {
            link: max(0.0, each.latency.at(0.0, "") - fit.usual_between)
            for link, each in fit.links.conditions.items()
        }
        usual = median(shown.values()) if shown else 0.0
        if given is None:
            return Links(shown, usual)
        given.check_ranks(fit.schedule.num_ranks)
        kept = {link: ms for link, ms in shown.items() if not {link, link[::-1]} & given.conditions.keys()}
        return Links({**kept, **given.conditions}, given.default or usual)

    def _time(self, steps: Array, input_share: float = 0.5) -> float:
        """Ms of a step: of its slowest replica. `steps` and `input_share` are as for `FittedPipelines.costs_of`."""
        return max(
            simulate(
                self.schedule, self._costs(steps, replica, input_share), links=self._links, channels=self.channels
            ).makespan
            for replica in range(self.fit.num_replicas)
        )

    def _costs(self, steps: Array, replica: int, input_share: float = 0.5) -> Costs:
        return self.fit.costs_of(
            self.schedule, steps, replica, layers=self.layers, cut=self.cut, input_share=input_share,
            is_first_whole=self.is_in_torch, with_between=True, message_bytes=self.message_bytes,
        )  # fmt: skip

    def _placed(self) -> StepModel:
        """The same with its messages as ops, where torch's channels carry them."""
        if not self.is_in_torch or has_communication(self.schedule):
            return self
        costs = self._costs(self._middle, 0)
        return replace(self, schedule=add_communication(self.schedule, costs, self._links, channels=self.channels))

    def _assumed(self, is_placed: bool, rest: float, is_halved: bool) -> tuple[str, ...]:
        """What a prediction takes for granted, in sentences."""
        channels, between, num_steps = self.channels, self.fit.usual_between, len(self.run.table.steps)
        given = "" if self.links is None else " but those given"
        guessed = ", ".join(f"{a} to {b}" for a, b in self.fit.guessed)
        place = "the file has them" if is_placed else "PlannedSchedule puts them, often sooner than torch does"
        is_divided = self.schedule.num_stages != self.fit.schedule.num_stages and not self.cut
        is_untried = channels not in (BUFFERED, GLOO)
        longer = f"{abs(rest):.3g} ms {'longer' if rest > 0 else 'shorter'} than the simulation of what ran"
        kept = f"recorded steps are {longer}, and so is this one"
        if self.is_in_torch:
            kept = f"what a step does before and after its microbatches ({rest:.3g} ms) stays the same"
        assumed = {
            f"an op takes what it took in the recorded steps, and {between:.2g} ms pass before the next one": True,
            "one step was recorded, so the error bar does not hold how much steps differ": num_steps == 1,
            f"links{given} are as late as the trace shows, whatever the number of messages": True,
            f"links whose messages nobody waited for ({guessed}) are like others": bool(guessed),
            f"messages stand where {place}, and {channels} carries them; the first stage's I does nothing": (
                self.is_in_torch
            ),
            f"the error bar was measured on gloo; no run on {channels} was compared": is_untried,
            "I takes half of a backward, 40% to 60% in the error bar; both halves add up to the whole": is_halved,
            "a layer takes as long in any stage; what stages take besides layers stays there": bool(self.cut),
            "recorded stages divide evenly; --layers and --cut say how they do": is_divided,
            kept: abs(rest) > SMALLEST_REST * self.measured,
        }
        return tuple(text for text, holds in assumed.items() if holds)


def _require_fit(
    name: str, recorded: Schedule, schedule: Schedule, layers: Sequence[int], cut: Sequence[int]
) -> None:
    """Raises TraceError if a schedule has other counts than the recorded one, or a cut does not fit its stages."""
    for noun in ("ranks", "microbatches"):
        has, needs = (getattr(each, f"num_{noun}") for each in (recorded, schedule))
        if has != needs:
            raise TraceError(f"{name} has {has} {noun}, the schedule {schedule.name} has {needs}; give one for {has}")
    if cut and len(layers) != recorded.num_stages:
        raise TraceError(
            f"a cut needs to know how many layers each of the {recorded.num_stages} recorded stages has; give them "
            "by --layers"
        )
    if cut and (len(cut) != schedule.num_stages or sum(cut) != sum(layers) or min(cut) < 1):
        raise TraceError(
            f"the cut is {', '.join(map(str, cut))}: give how many of the {sum(layers)} layers each of the "
            f"{schedule.num_stages} stages of {schedule.name} has, at least 1"
        )
