"""Running a schedule's order without time or tensors: where it ends, and what it needs on the way.

Receiving and sending are blocking and deterministic, so the ranks reach the same end whatever their speed:
one run is a proof.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
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


def run_untimed(schedule: Schedule, channel_depth: int | None) -> UntimedRun[Op]:
    """Runs the frozen order until no rank can go on, over channels of bounded depth or, where the depth is
    None, over channels that hold all that is in flight and so never fill up.

    What updates send, gradients to the owner and parameters from it, has lines of its own that hold no rank up."""
    return run_on(schedule, ()) if channel_depth is None else _run_bounded(schedule, channel_depth)


def run_on(schedule: Schedule, begun: Sequence[int], also: Iterable[tuple[Op, Op]] = ()) -> UntimedRun[Op]:
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


def _run_bounded(schedule: Schedule, channel_depth: int) -> UntimedRun[Op]:
    """Runs rows in which the messages of an op stand after it, by their numbers, and wait for room in their channel.

    A channel has room for its message number n once the op that uses its message number n - `channel_depth` has run.
    """
    if schedule.has_shared_ops or schedule.asynchronous:
        raise ScheduleError(
            "channels of bounded depth are not defined for ops that several ranks run together, nor for asynchronous "
            "ones; leave channel_depth unset",
            rule="deadlock",
        )
    rank_of_op = {op: rank for rank, row in enumerate(schedule.order) for op in row}
    graph = replace(schedule.graph, pairs=())
    needs: dict[Op | int, list[Op | int]] = {}
    messages: list[tuple[Op, Op]] = []  # the op that makes it, and the op that uses it
    sent: dict[Op, list[int]] = {}
    users: dict[tuple[int, int, bool], list[Op]] = {}  # of each channel, in the order of their row

    def channel(message: int) -> tuple[int, int, bool]:
        producer, consumer = messages[message]
        return rank_of_op[producer], rank_of_op[consumer], producer.kind == FORWARD

    for op, rank in rank_of_op.items():
        needs[op] = []
        for producer in predecessors(op, graph, rank_of_op):
            if op.kind in OF_UPDATES or not carries_message(producer, op) or rank_of_op.get(producer, rank) == rank:
                needs[op].append(producer)
                continue
            messages.append((producer, op))
            needs[op].append(len(messages) - 1)
            sent.setdefault(producer, []).append(len(messages) - 1)
            users.setdefault(channel(len(messages) - 1), []).append(op)
    for forward, backward in schedule.graph.pairs:
        if forward in needs and backward in needs:  # what its backward needs has to be there, but is taken by that
            needs[forward] += [each for each in needs[backward] if each != forward]
    rows: list[list[Op | int]] = [[each for op in row for each in (op, *sent.get(op, ()))] for row in schedule.order]
    num_sent = Counter[tuple[int, int, bool]]()
    for message in (each for row in rows for each in row if isinstance(each, int)):
        key = channel(message)
        full = num_sent[key] - channel_depth
        needs[message] = [users[key][full]] if full >= 0 else []
        num_sent[key] += 1
    run = run_rows(rows, needs.__getitem__, {})
    steps: list[int] = []
    blocked: dict[int, tuple[Op, int, bool]] = {}
    for rank, (row, step) in enumerate(zip(rows, run.steps, strict=True)):
        steps.append(sum(isinstance(each, Op) for each in row[:step]))
        if rank in run.blocked:
            missing, peer, _ = run.blocked[rank]
            at = row[step]
            if isinstance(at, int):
                blocked[rank] = messages[at][0], channel(at)[1], True
            else:
                blocked[rank] = messages[missing][0] if isinstance(missing, int) else missing, peer, False
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
    added = {FORWARD: 1, BACKWARD: -1, INPUT: -1}
    rows = ([added.get(op.kind, 0) for op in row] for row in schedule.order)
    return max((max(accumulate(row, initial=0)) for row in rows), default=0)


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
