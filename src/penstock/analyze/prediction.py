"""What a step of another schedule, cut, link or channel would take, by simulation from a recorded run.

    trace of 1f1b --> ms of each op, ms between ops, ms of each link --> simulate zb over gloo --> 812 ms, 795 to 829

The ops of a step are drawn from the recorded steps many times, each microbatch's from one of them. The middle of the
simulated times is the prediction, and their spread and the model's own error are its error bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from penstock.analyze.fitted_pipelines import FittedPipelines, most_held
from penstock.analyze.run_analysis import RunAnalysis
from penstock.analyze.what_if import WhatIf
from penstock.cost import Costs, Links
from penstock.formats.traces import Scope, TraceError
from penstock.library import build
from penstock.passes import add_communication
from penstock.schedule import Schedule, check
from penstock.schedule.channels import BUFFERED, GLOO, require_channel
from penstock.schedule.send_recv import has_communication, remove_communication
from penstock.simulation import simulate

DRAWS = 20
MODEL_ERROR = 0.02
"""Share by which a prediction may be wrong besides the spread of steps. `benchmarks/arrive` measures it, on gloo."""
HALVES = (0.4, 0.6)
"""Between which shares of a whole backward I may take, where no op shows it."""


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
        TraceError: ranks did not run one order in all steps, or layers and cut do not fit the stages.
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
    fit = found.fit
    if fit is None:
        raise TraceError(
            f"{found.name}: orders differ between steps or replicas, so no other schedule can be predicted; choose "
            "steps of one order with --only-steps"
        )
    require_channel(channels)
    recorded = fit.schedule
    if schedule is None:
        schedule = replace(recorded, name=fit.name)
    elif isinstance(schedule, str):
        schedule = build(schedule, recorded.num_ranks, recorded.num_microbatches)
    check(schedule)
    _require_fit(found.name, recorded, schedule, layers, cut)
    if links is not None and not message_bytes and any(each.bandwidth for each in links.conditions.values()):
        raise TraceError("a link with a bandwidth needs the bytes of a message; give them by --message-bytes")
    there = _links(fit, links)
    num_steps, num_replicas = len(found.run.table.steps), found.run.table.trace.num_replicas
    in_torch = channels != BUFFERED

    def costs_of(steps: np.ndarray, replica: int, share: float) -> Costs:
        return fit.costs_of(
            schedule, steps, replica, layers=layers if cut else (), cut=cut, input_share=share,
            is_first_whole=in_torch, with_between=True, message_bytes=message_bytes,
        )  # fmt: skip

    middle = np.argsort(found.run.replayed, kind="stable")[num_steps // 2]
    placed = schedule
    if in_torch and not has_communication(schedule):
        placed = add_communication(schedule, costs_of(middle, 0, 0.5), there, channels=channels)

    def takes(steps: np.ndarray, share: float = 0.5) -> float:
        return max(
            simulate(placed, costs_of(steps, replica, share), there, channels=channels).makespan
            for replica in range(num_replicas)
        )

    random = np.random.default_rng(0)
    num = recorded.num_microbatches
    drawn = [takes(random.integers(num_steps, size=num)) for _ in range(DRAWS if num_steps > 1 else 1)]
    time = median(drawn)
    low, high = np.quantile(drawn, [0.05, 0.95])
    is_halved = "I" not in fit.times and any(op.kind == "I" for row in schedule.order for op in row)
    if is_halved:
        ends = [time - takes(middle) + takes(middle, share) for share in HALVES]
        low, high = min(low, *ends), max(high, *ends)
    is_divided = schedule.num_stages != recorded.num_stages
    besides = _besides(found)
    measured = float(found.run.measured.mean())
    between = float(np.mean(list(fit.between.values())))
    given = "" if links is None else " but those given"
    place = "the file has them" if placed is schedule else "PlannedSchedule puts them, often sooner than torch does"
    assumed = {
        f"an op takes what it took in the recorded steps, and {between:.2g} ms pass before the next one": True,
        "one step was recorded, so the error bar does not hold how much steps differ": num_steps == 1,
        f"links{given} are as late as the trace shows, whatever the number of messages": True,
        f"messages stand where {place}, and {channels} carries them; the first stage's I does nothing": in_torch,
        f"the error bar was measured on gloo; no run on {channels} was compared": channels not in (BUFFERED, GLOO),
        "I takes half of a backward, 40% to 60% in the error bar, and both halves as long as the whole": is_halved,
        "a layer takes as long in any stage; what stages take besides layers stays there": bool(cut),
        "recorded stages divide evenly; --layers and --cut say how they do": is_divided and not cut,
        f"what a step does before and after its microbatches ({besides:.3g} ms) stays the same": besides > 0,
    }
    return WhatIf(
        "try",
        schedule.name,
        time + besides,
        measured / (time + besides),
        most_held(remove_communication(schedule)),
        (float(low) * (1 - MODEL_ERROR) + besides, float(high) * (1 + MODEL_ERROR) + besides),
        tuple(text for text, holds in assumed.items() if holds),
    )


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


def _links(fit: FittedPipelines, given: Links | None) -> Links:
    """The given links, and what the trace shows of the others; the middle of these for links without messages."""
    between = float(np.mean(list(fit.between.values())))  # a receiver takes it too, and its ops have it
    shown = {link: max(0.0, each.latency.at(0.0, "") - between) for link, each in fit.links.conditions.items()}
    usual = median(shown.values()) if shown else 0.0
    if given is None:
        return Links(shown, usual)
    given.check_ranks(fit.schedule.num_ranks)
    kept = {link: ms for link, ms in shown.items() if not {link, link[::-1]} & given.conditions.keys()}
    return Links({**kept, **given.conditions}, given.default or usual)


def _besides(found: RunAnalysis) -> float:
    """Ms of a step before the first op of a microbatch and after the last: collectives, the optimizer."""
    table = found.run.table
    ops = table.is_scope(Scope.COMPUTE)
    span = table.end[:, ops].max(axis=1) - table.start[:, ops].min(axis=1)
    return float((found.run.measured - span).mean())
