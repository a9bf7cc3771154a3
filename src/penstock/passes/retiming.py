"""Retimes a schedule: the same ops, each as soon as it can really run over these costs and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.cost import Costs, Links
from penstock.engine.memory import peaks
from penstock.engine.tolerance import slack
from penstock.passes.memory import check_fits, memory_of
from penstock.passes.network import network
from penstock.passes.separate import Separation
from penstock.schedule import Op, Schedule, ScheduleError, check
from penstock.simulation import simulate

_ROUNDS = 4
"""How often a better order is retimed again, at most."""


def retime(
    schedule: Schedule,
    costs: Costs | None = None,
    links: Links | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """The order in which the ops can really run, where that is shorter than the order given.

        before, messages 2 ms late, 21 ms
        rank 0 | F0 F1 .  .  .  .  .  I0 W0 F2 I1 W1 F3 .  .  .  I2 W2 .  I3 W3
        rank 1 | .  .  .  F0 I0 F1 I1 W0 .  .  .  .  F2 I2 W1 F3 I3 W2 W3

        after, 19 ms
        rank 0 | F0 F1 F2 .  .  .  .  I0 W0 I1 F3 I2 W1 W2 .  .  .  I3 W3
        rank 1 | .  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2 .  F3 I3 W3

    Two ways are tried, again and again while the schedule gets shorter:

    - run: every rank takes any ready op (I or B, then F, then W) under its memory cap, over these costs and
      links; the order in which that happened becomes the frozen order;
    - relist: all other ops keep their order, and every W moves to where it does least harm, into bubbles or to
      the end (as in `separate_gradients`).

    Each kind of op keeps its order within a stage, and so do the backwards that add to the same gradients. The
    result is never longer than what came in, in the frozen order with decoupled messages.

    Args:
        schedule: what is reordered.
        costs: per stage; by default F = I = W = 1 ms for each rank's share of the model (`Costs.assumed`).
        links: delays; by default none.
        memory_limit: most a rank may hold, in the units of the costs' activations; one for all or one per rank.
            By default each rank's own peak. The schedule's own limit, in stage activations, holds besides.

    Raises:
        ScheduleError: the schedule is not valid, or is itself above the limit.
        CostError: costs for another number of stages, or a link between ranks that are not there.

    Examples:
        >>> import penstock as ps
        >>> late = ps.Links({(0, 1): 2.0})
        >>> s = ps.build("zb-h1", 2, 4)
        >>> after = ps.passes.retime(s, links=late)
        >>> ps.simulate(after, links=late).makespan <= ps.simulate(s, links=late).makespan
        True
    """
    check(schedule)
    costs, links = costs or Costs.assumed(schedule.num_ranks, schedule.placement), links or Links()
    best, makespan, caps = schedule, *_measured(schedule, costs, links, memory_limit)
    for _ in range(_ROUNDS):
        found = best
        for candidate in _candidates(best, costs, links, caps):
            if not _keeps(schedule.max_in_flight, candidate):
                continue
            _, reached = network(candidate, costs, links).earliest_frozen()
            if reached < makespan - slack(makespan):
                found, makespan = candidate, reached
        if found is best:
            break
        best = found
    return best


def _keeps(limit: float | None, candidate: Schedule) -> bool:
    """Whether an order is right and keeps to a schedule's own limit: caps are in the unit of the costs."""
    try:
        check(candidate, max_in_flight=limit)
    except ScheduleError:
        return False
    return True


def _measured(
    schedule: Schedule, costs: Costs, links: Links, memory_limit: float | Sequence[float] | None
) -> tuple[float, list[float]]:
    """The makespan (ms) and the caps of every rank."""
    net = network(schedule, costs, links)
    memory = memory_of(schedule, net.graph, costs, memory_limit)
    check_fits(schedule, net.graph, memory, "retiming lowers no memory: see penstock.passes.recompute")
    _, makespan = net.earliest_frozen()
    if memory_limit is not None:
        return makespan, memory.caps
    return makespan, peaks(memory.change, net.graph.first)


def _candidates(schedule: Schedule, costs: Costs, links: Links, caps: list[float]) -> list[Schedule]:
    found = [simulate(schedule, costs, links=links, dispatch="dynamic", memory_limit=caps).executed()]
    relisted = _relisted(schedule, costs, links, caps)
    return found if relisted is None else [*found, relisted]


def _relisted(schedule: Schedule, costs: Costs, links: Links, caps: list[float]) -> Schedule | None:
    """The schedule with every W where it does least harm, or None where there is none or it is not shorter."""
    graph = schedule.graph
    named = {end[1] for need in graph.needs for end in (need.before, need.after) if end[0] in ("I", "W")}
    loose = {
        op
        for row in schedule.order
        for op in row
        if op.kind == "I" and op.stage not in named and len(schedule.hosts(op)) == 1
    }
    if not loose or schedule.updates is not None:  # a W that moves could come after the update that gathers it
        return None
    gone = {Op("W", op.stage, op.microbatch) for op in loose}
    joined = replace(
        schedule,
        order=tuple(
            tuple(Op("B", op.stage, op.microbatch) if op in loose else op for op in row if op not in gone)
            for row in schedule.order
        ),
    )
    if _adders(joined) != _adders(schedule):
        return None
    _, before = network(schedule, costs, links).earliest_frozen()
    net = network(joined, costs, links)
    split = {net.graph.number[Op("B", op.stage, op.microbatch)] for op in loose}
    durations = [
        costs.duration("I", *net.graph.ops[node][1:]) if node in split else duration
        for node, duration in enumerate(net.durations)
    ]
    _, least = net.earliest(durations)
    memory = memory_of(joined, net.graph, costs, caps)
    rows = Separation(joined, costs, net, memory, split).filled(split, durations, least, before)
    return None if rows is None else replace(schedule, order=tuple(map(tuple, rows)))


def _adders(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Per rank, by stage, the microbatches in the order in which they add to the weights' gradients."""
    return [
        sorted(((op.stage, op.microbatch) for op in row if op.kind in ("B", "W")), key=lambda pair: pair[0])
        for row in schedule.order
    ]
