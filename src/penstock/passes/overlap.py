"""Joins a forward and the backward after it into pairs, which a rank runs as one (see `schedule.pairs`).

    before   rank 0 | 0F0 0F1 3F0 3B0 0F2 3B1 3F2 0B0        after   rank 0 | 0F0 0F1 3F0 3B0 0F2+3B1 3F2+0B0

A pair is shorter than its two ops one after the other (`Costs.overlap`), but its forward waits for what its backward
needs, and what each of the two makes leaves at the end of both. So not every pair is worth its while, and some would
wait for one another in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.cost import Costs, Links
from penstock.engine.tolerance import slack
from penstock.schedule import Op, Pair, Schedule, check
from penstock.schedule.async_ops import rows_of
from penstock.schedule.dependencies import predecessors
from penstock.schedule.liveness import run_on
from penstock.schedule.op import BACKWARD, FORWARD
from penstock.schedule.pairs import separate_pairs
from penstock.simulation import Timeline, simulate

__all__ = ["overlap_pairs", "separate_pairs"]


def overlap_pairs(schedule: Schedule, costs: Costs | None = None, links: Links | None = None) -> Schedule:
    """The schedule with pairs of each forward and full backward that follow each other on a rank, of different
    microbatches, where that makes it shorter.

    The order stays as it is. Pairs that are there already are weighed again.

    Args:
        schedule: what gets the pairs.
        costs: with `overlap`, what pairs hide. By default all pairs are joined that can be without a deadlock.
        links: delays between the ranks; by default none.

    Raises:
        ScheduleError: the schedule is not valid.
        CostError: the costs are for another number of stages, or the links name ranks that are not there.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs(f=[10] * 4, i=[10] * 4, w=[10] * 4, overlap=ps.cost.Overlap(f=[5.0] * 4, b=[9.0] * 4))
        >>> s = ps.passes.separate_pairs(ps.build("dualpipe-v", 2, 4, overlap=True))
        >>> len(ps.passes.overlap_pairs(s, costs).pairs) > 0
        True
    """
    found = joinable_pairs(schedule)
    alone = separate_pairs(schedule)
    return replace(alone, pairs=found) if costs is None else weigh_pairs(alone, found, costs, links)


def joinable_pairs(schedule: Schedule, is_over: Callable[[], bool] = lambda: False) -> tuple[Pair, ...]:
    """The pairs of a forward and the backward after it that can run together; none where it takes too long to say.

    Args:
        is_over: is asked, again and again, whether it does.

    Raises:
        ScheduleError: the schedule is not valid.
    """
    check(schedule)
    alone = separate_pairs(schedule)
    return _without_deadlock(alone, _neighbours(alone), is_over)


def weigh_pairs(
    schedule: Schedule,
    pairs: Sequence[Pair],
    costs: Costs,
    links: Links | None,
    is_over: Callable[[], bool] = lambda: False,
) -> Schedule:
    """A schedule without pairs with those of some that make it shorter, as far as time is left to find out.

    Args:
        is_over: is asked before each simulation.
    """
    best, shortest = schedule, simulate(schedule, costs, links).makespan
    kept: Sequence[Pair] = pairs
    while kept and not is_over():
        tried = replace(schedule, pairs=tuple(kept))
        ran = simulate(tried, costs, links)
        if ran.makespan < shortest - slack(shortest):
            best, shortest = tried, ran.makespan
        losing = _losing(ran, costs)
        if not losing:
            break
        kept = [pair for pair in kept if pair not in losing]
    return best


def _neighbours(schedule: Schedule) -> list[Pair]:
    """Each forward with the backward right after it, where the two can be a pair."""
    shared = {stage for stage, _ in schedule.placement.shared}
    return [
        Pair(a, b)
        for row in schedule.order
        for a, b in pairwise(row)
        if (a.kind, b.kind) == (FORWARD, BACKWARD)
        and a.microbatch != b.microbatch
        and not {a.stage, b.stage} & shared
    ]


def _without_deadlock(schedule: Schedule, pairs: Sequence[Pair], is_over: Callable[[], bool]) -> tuple[Pair, ...]:
    """Those of the pairs that can run together. Where some wait for one another, one at which a rank stands for what
    its backward needs is left out, and then the next; without it the others can all do what they had done. The
    schedule runs without any, so there is one."""
    own = schedule.graph
    present = {op: rank for rank, row in enumerate(schedule.order) for op in row}
    tried = replace(schedule, pairs=tuple(pairs))
    steps: tuple[int, ...] = ()
    while (run := run_on(tried, steps)).blocked:
        if is_over():
            return ()
        steps = run.steps
        standing = {rows_of(tried)[row][run.steps[row]]: missing for row, (missing, _, _) in run.blocked.items()}
        left_out = next(
            pair
            for pair in tried.pairs
            if pair.forward in standing and standing[pair.forward] not in predecessors(pair.forward, own, present)
        )
        tried = replace(tried, pairs=tuple(pair for pair in tried.pairs if pair != left_out))
    return tried.pairs


def _losing(ran: Timeline, costs: Costs) -> set[Pair]:
    """The pairs whose forward waited longer for what the backward needs than the pair saves."""
    backward_of = dict(ran.schedule.pairs)
    came: dict[Op, list[tuple[Op, float]]] = {}
    for message in ran.messages:
        came.setdefault(message.target, []).append((message.source, message.arrived))
    losing = set()
    for row in ran.rows:
        free = 0.0
        for timed in row:
            backward = backward_of.get(timed.op)
            if backward is not None:
                own = max([free, *(arrived for _, arrived in came.get(timed.op, ()))])
                saved = (
                    costs.duration(*timed.op) + costs.duration(*backward) - costs.pair_duration(timed.op, backward)
                )
                if timed.start - own > saved + slack(timed.start) or saved <= 0:
                    losing.add(Pair(timed.op, backward))
            free = max(free, timed.end)
    return losing
