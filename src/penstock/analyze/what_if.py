"""What would help, each tried by simulation: what a step would take, and how many times as fast that is.

Packing, cuts and healthy workers are tried on the whole recorded steps, collectives and all. Other orders, dispatch,
schedules and assignments are tried on the pipelines of some of the steps: what the slowest replica gains, the step
gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.analyze.causes import without
from penstock.analyze.effects import Effects
from penstock.analyze.fitted_pipelines import FittedPipelines, cut_anew, layer_times, most_held
from penstock.analyze.replayed_run import OwnTimes, ReplayedRun
from penstock.cost import Costs
from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.library import build
from penstock.planning import order_microbatches
from penstock.planning.batches import assign_evenly
from penstock.schedule import Schedule, ScheduleError
from penstock.simulation import simulate

MOST_STEPS = 3
"""Steps whose pipelines are simulated: those whose times lie evenly among all."""
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "zb", "v-half")


@dataclass(frozen=True)
class WhatIf:
    """One change and what it would give.

    Attributes:
        kind: "packing", "cut", "order", "dispatch", "assignment", "schedule", "workers" or "try".
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
        found = {"kind": self.kind, "what": self.what, "time_ms": self.time, "speedup": self.speedup}
        return {**found, "in_flight": self.memory, "bar_ms": self.bar, "assumed": self.assumed}


def what_ifs(
    run: ReplayedRun, effects: Effects, fit: FittedPipelines | None, layers: Sequence[int] = ()
) -> tuple[WhatIf, ...]:
    """All of them, the greatest gain first.

    Args:
        layers: of each stage, in order; then a better cut is one that can be made.
    """
    found = list(_whole_steps(run, effects, layers))
    if fit is not None:
        found += _pipelines(run, fit)
    return tuple(sorted(found, key=lambda each: -each.speedup))


def _after(run: ReplayedRun, kind: str, what: str, won: float, memory: float | None = None) -> WhatIf:
    """A change that makes the mean step shorter by ms."""
    measured = float(run.measured.mean())
    return WhatIf(kind, what, measured - won, measured / (measured - won), memory)


def _whole_steps(run: ReplayedRun, effects: Effects, layers: Sequence[int]) -> Iterator[WhatIf]:
    replayed = float(run.replayed.mean())

    def won(own: OwnTimes) -> float:
        return replayed - run.mean(own)

    yield _after(
        run, "packing", "microbatches packed so that all take as long", won(without(run, effects, effects.microbatch))
    )
    if (effects.worker > 1).any():
        yield _after(
            run,
            "workers",
            "every rank as fast as its like",
            won(without(run, effects, np.maximum(effects.worker, 1.0))),
        )
    num_stages = run.table.trace.num_stages
    if num_stages < 2:
        return
    if not layers:
        even = effects.by_stage.sum(axis=0)
        move = 1 - even.mean() / even.max()
        what = f"an even cut: {move:.0%} of stage {int(np.argmax(even))}'s work moved to other stages"
        yield _after(run, "cut", what, won(without(run, effects, effects.stage)))
        return
    work = np.nansum(effects.by_stage, axis=0)
    better = better_cut(work, layers)
    factor = work / cut_anew(work[:, None], layers, better, num_stages)[:, 0]
    stage = run.table.stage[effects.ops]
    yield _after(
        run, "cut", f"layers {', '.join(map(str, better))} to the stages instead of {', '.join(map(str, layers))}",
        won(without(run, effects, np.broadcast_to(factor[stage], effects.stage.shape))),
    )  # fmt: skip


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


def _pipelines(run: ReplayedRun, fit: FittedPipelines) -> Iterator[WhatIf]:
    order = np.argsort(run.replayed, kind="stable")
    steps = [int(order[round(q)]) for q in np.linspace(0, len(order) - 1, min(MOST_STEPS, len(order)) + 2)[1:-1]]
    replicas = range(run.table.trace.num_replicas)
    own = {(k, d): fit.costs(k, d) for k in steps for d in replicas}

    def longest(time: Callable[[int, int], float]) -> float:
        """Mean over the steps of what the slowest replica takes."""
        return float(np.mean([max(time(k, d) for d in replicas) for k in steps]))

    def runs(schedule: Schedule, costs: Costs, dispatch: str = "frozen") -> float:
        return simulate(schedule, costs, links=fit.links, dispatch=dispatch).makespan

    before = longest(lambda k, d: runs(fit.schedule, own[k, d]))
    hinted = longest(lambda k, d: min(runs(fit.schedule, own[k, d], each) for each in ("frozen", "hinted")))
    what = "whatever op is ready first (hinted dispatch), where that is faster"
    yield _after(run, "dispatch", what, before - hinted)
    has_own_order = bool(fit.schedule.microbatch_orders)
    if not has_own_order:
        ordered = longest(lambda k, d: order_microbatches(fit.schedule, own[k, d], links=fit.links).makespan)
        what = "each replica's microbatches in the best order, their lengths known"
        yield _after(run, "order", what, before - ordered)
    if len(replicas) > 1:
        dealt = {k: _dealt(fit, k) for k in steps}
        moved = longest(lambda k, d: runs(fit.schedule, dealt[k][d]))
        yield _after(run, "assignment", "microbatches dealt out to replicas by their work", before - moved)
    if len(replicas) > 1 and not has_own_order:
        both = longest(lambda k, d: order_microbatches(fit.schedule, dealt[k][d], links=fit.links).makespan)
        yield _after(
            run,
            "assignment",
            "microbatches dealt out to replicas by their work, then in the best order",
            before - both,
        )
    yield from _schedules(run, fit, steps, before)


def _schedules(run: ReplayedRun, fit: FittedPipelines, steps: Sequence[int], before: float) -> Iterator[WhatIf]:
    """Other schedules that hold no more than the recorded one did."""
    ranks, num = fit.schedule.num_ranks, fit.schedule.num_microbatches
    if fit.schedule.num_stages != ranks:
        return  # how a rank's stages would be laid out anew is not known
    for name in SCHEDULES:
        if name == fit.name:
            continue
        try:
            schedule = build(name, ranks, num)
        except ScheduleError:
            continue
        memory = most_held(schedule)
        if schedule.placement.num_pipelines > 1 or memory > fit.in_flight * (1 + EPSILON):
            continue
        times = [
            max(
                simulate(schedule, fit.costs_of(schedule, np.array(step), replica), links=fit.links).makespan
                for replica in range(run.table.trace.num_replicas)
            )
            for step in steps
        ]
        what = f"{name} instead of {fit.name}"
        if "B" in fit.times and any(op.kind == "I" for op in schedule.order[0]):
            what += ", a backward's two halves taking half of it each"
        yield _after(run, "schedule", what, before - float(np.mean(times)), memory)


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
