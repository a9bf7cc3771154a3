"""Running a schedule's order without time or tensors: where it ends, and what it needs on the way.

Receiving and sending are blocking and deterministic, so the ranks reach the same end whatever their speed:
one run is a proof.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.engine.memory import peaks
from penstock.schedule.async_ops import activations_added, launches, memory_edges, rows_of
from penstock.schedule.dependencies import UntimedRun, carries_message, predecessors, run_rows
from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, OF_UPDATES, RECOMPUTE, Op
from penstock.schedule.placement import ranks_together
from penstock.schedule.schedule import Schedule


def run_untimed(schedule: Schedule, channel_depth: int | None) -> UntimedRun:
    """Runs the frozen order until no rank can go on, over channels of bounded depth or, where the depth is
    None, over channels that hold all that is in flight and so never fill up.

    What updates send, gradients to the owner and parameters from it, has lines of its own that hold no rank up."""
    return run_on(schedule, ()) if channel_depth is None else _run_bounded(schedule, channel_depth)


def run_on(schedule: Schedule, begun: Sequence[int], also: Iterable[tuple[Op, Op]] = ()) -> UntimedRun:
    """The same from a place that a run of it reached, or of it with more to wait for, over channels that never fill
    up. Where a run ends does not depend on the way there, so it ends where one from the beginning does.

    Args:
        begun: ops that each row has done; empty from the beginning.
        also: (before, op) where an op needs more than the schedule says.
    """
    rows = rows_of(schedule)
    present = {op: number for number, row in enumerate(rows) for op in row}
    together = ranks_together(schedule)
    if schedule.asynchronous:
        streams = {op: tuple(r + schedule.num_ranks for r in ranks) for op, ranks in together.items()}
        together |= {op: ranks for op, ranks in streams.items() if op[:2] in schedule.asynchronous}
    more: dict[Op, list[Op]] = {}
    in_memory = () if schedule.max_in_flight is None else memory_edges(schedule, schedule.max_in_flight)
    for before, op in (*((before, op) for before, op, _ in launches(schedule)), *in_memory, *also):
        more.setdefault(op, []).append(before)
    graph = schedule.graph

    def needs(op: Op) -> list[Op]:
        needed = predecessors(op, graph, present)
        return [*needed, *more[op]] if op in more else needed

    return run_rows(rows, needs, together, begun)


def _run_bounded(schedule: Schedule, channel_depth: int) -> UntimedRun:
    rank_of_op = {op: r for r, row in enumerate(schedule.order) for op in row}
    graph, pairs = replace(schedule.graph, pairs=()), schedule.graph.backward_of
    if schedule.has_shared_ops or schedule.asynchronous:
        raise ScheduleError(
            "channels of bounded depth are not defined for ops that several ranks run together, nor for asynchronous "
            "ones; leave channel_depth unset",
            rule="deadlock",
        )
    needs = {op: predecessors(op, graph, rank_of_op) for op in rank_of_op}
    receivers: dict[Op, list[Op]] = {}
    for op, needed in needs.items():
        for producer in needed:
            if (
                op.kind not in OF_UPDATES
                and carries_message(producer, op)
                and rank_of_op.get(producer) != rank_of_op[op]
            ):
                receivers.setdefault(producer, []).append(op)
    steps = [0] * schedule.num_ranks
    unsent: list[deque[Op]] = [deque() for _ in schedule.order]
    held: dict[tuple[int, int, bool], int] = {}
    arrived: set[tuple[Op, Op]] = set()
    done: set[Op] = set()
    awaited: dict[Op, set[int]] = {}
    blocked: dict[int, tuple[Op, int, bool]] = {}

    def channel(producer: Op, consumer: Op) -> tuple[int, int, bool]:
        return rank_of_op[producer], rank_of_op[consumer], producer.kind == FORWARD

    def advance(rank: int) -> set[int]:
        """Runs one rank as far as it goes; returns the ranks this may have woken."""
        woken: set[int] = set()
        row = schedule.order[rank]
        while True:
            while unsent[rank]:
                consumer = unsent[rank][0]
                producer = row[steps[rank] - 1]
                key = channel(producer, consumer)
                if held.get(key, 0) >= channel_depth:
                    blocked[rank] = producer, key[1], True
                    return woken
                held[key] = held.get(key, 0) + 1
                arrived.add((producer, consumer))
                unsent[rank].popleft()
                woken.add(key[1])
            if steps[rank] == len(row):
                blocked.pop(rank, None)
                return woken
            op = row[steps[rank]]
            waits = [(producer, op) for producer in needs[op]]
            if pairs.get(op) in needs:  # what its backward needs has to be there, but is taken by that
                waits += [(producer, pairs[op]) for producer in needs[pairs[op]] if producer != op]
            for producer, user in waits:
                remote = rank_of_op.get(producer, rank) != rank
                if producer not in done if not remote or op.kind in OF_UPDATES else (producer, user) not in arrived:
                    blocked[rank] = producer, rank_of_op.get(producer, rank), False
                    if op.kind in OF_UPDATES:
                        awaited.setdefault(producer, set()).add(rank)
                    return woken
            for producer in needs[op]:
                if (producer, op) in arrived:
                    key = channel(producer, op)
                    held[key] -= 1
                    woken.add(key[0])
            done.add(op)
            steps[rank] += 1
            unsent[rank].extend(receivers.get(op, ()))
            woken |= awaited.pop(op, set())

    pending = deque(range(schedule.num_ranks))
    while pending:
        for rank in sorted(advance(pending.popleft())):
            if rank not in pending:
                pending.append(rank)
    return UntimedRun(tuple(steps), blocked)


def needed_channel_depth(schedule: Schedule) -> int:
    """The smallest depth of every channel with which a schedule that `check` accepts still completes.

    Args:
        schedule: one that `check` accepts.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.needed_channel_depth(ps.build("zb-h1", 4, 8))
        1
    """
    if schedule.has_shared_ops or schedule.asynchronous:
        return int(max(_peaks(schedule, {})))
    if not run_untimed(schedule, 1).blocked:
        return 1
    depths = range(2, most_ahead(schedule) + 1)
    return depths[bisect_left(depths, True, key=lambda depth: not run_untimed(schedule, depth).blocked)]


def most_ahead(schedule: Schedule) -> int:
    """Most forwards any rank has run without their backward, recomputed or not: what a channel may have to hold."""
    most = 0
    for row in schedule.order:
        ahead = 0
        for op in row:
            ahead += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(op.kind, 0)
            most = max(most, ahead)
    return most


def peak_in_flight(schedule: Schedule) -> tuple[float, ...]:
    """Most stage activations each rank holds at once when they live from F to B or W.

    Those that registered ops give back do not count, from the place of such an op in the order.

    Args:
        schedule: any schedule.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.peak_in_flight(ps.build("1f1b", 4, 8))
        (4, 3, 2, 1)
    """
    return _peaks(schedule, schedule.graph.holds)


def _peaks(schedule: Schedule, holds: Mapping[tuple[str, int], float]) -> tuple[float, ...]:
    again = {(op.stage, op.microbatch) for row in schedule.order for op in row if op.kind == RECOMPUTE}
    first = list(accumulate(map(len, schedule.order), initial=0))
    changes = [activations_added(op, again, holds) for row in schedule.order for op in row]
    return tuple(int(peak) if peak == int(peak) else peak for peak in peaks(changes, first))
