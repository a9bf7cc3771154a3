"""Gives the queues of a schedule other orders of microbatches: the same shape, other numbers in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.schedule import Op, Pair, Schedule, check, declare_order
from penstock.schedule.microbatch_order import Order, order_kind
from penstock.schedule.op import BACKWARD, FORWARD, OF_UPDATES

_MESSAGES = {"SEND_F": FORWARD, "RECV_F": FORWARD, "SEND_B": BACKWARD, "RECV_B": BACKWARD}


def reorder_microbatches(
    schedule: Schedule,
    forward: Order | None = None,
    backward: Order | None = None,
    *,
    stages: Iterable[int] | None = None,
    pipelines: Iterable[int] | None = None,
) -> Schedule:
    """Declares orders as `declare_order` does, and renumbers the rows to keep them: where a queue ran its k-th
    microbatch before, it runs the k-th of the new order.

        before   rank 0 | F0 F1 F2 .  .  B0 B1 B2        backward="reversed"   rank 0 | F0 F1 F2 .  .  B2 B1 B0
                 rank 1 | .  F0 F1 F2 B0 B1 B2                                 rank 1 | .  F0 F1 F2 B2 B1 B0

    One permutation of forwards and backwards alike, on all stages, fits every schedule. Others fit where the rows
    leave room for them: 1F1B has no third forward before its first backward. Gradients are summed in the new order.

    Args:
        schedule: what is renumbered.
        forward: the order of the forwards, as in `declare_order`.
        backward: the order of the backwards.
        stages: the stages whose order it is; all where not given.
        pipelines: the pipelines whose order it is; all where not given.

    Raises:
        ScheduleError: what `declare_order` refuses; a schedule that is not valid; or a result that is not, as an op
            would come before what it needs (an update before a backward of its window, say).

    Examples:
        >>> import penstock as ps
        >>> s = ps.passes.reorder_microbatches(ps.build("gpipe", 2, 3), backward="reversed")
        >>> print(s)
        schedule gpipe: 2 ranks, 2 stages, 3 microbatches
        pipeline 0: stages on ranks 0 1
        order of B on stages 0 1: 2 1 0
        rank 0 | F0 F1 F2 .  .  B2 B1 B0
        rank 1 | .  F0 F1 F2 B2 B1 B0
    """
    check(schedule)
    renamed = declare_order(schedule, forward, backward, stages=stages, pipelines=pipelines)
    return _renumbered(schedule, renamed)


def with_orders_of(schedule: Schedule, other: Schedule) -> Schedule:
    """A schedule with the orders of microbatches of another one, its rows renumbered to keep them.

    Raises:
        ScheduleError: the orders are of queues that it does not have, or do not fit its rows; either is not valid.
    """
    check(schedule)
    return _renumbered(schedule, replace(schedule, microbatch_orders=other.microbatch_orders))


def _renumbered(schedule: Schedule, renamed: Schedule) -> Schedule:
    """`renamed` is the schedule with the orders that its rows are to have."""
    if renamed == schedule:
        return schedule
    new_name: dict[tuple[str, int, int], dict[int, int]] = {}

    def name(op: Op) -> Op:
        queue = order_kind(_MESSAGES.get(op.kind, op.kind)), op.stage, schedule.pipeline_of(op)
        if op.kind in OF_UPDATES:
            return op
        if queue not in new_name:
            before, after = schedule.microbatches_of(*queue), renamed.microbatches_of(*queue)
            new_name[queue] = dict(zip(before, after, strict=True))
        return op._replace(microbatch=new_name[queue][op.microbatch])

    rows = tuple(tuple(map(name, row)) for row in schedule.order)
    result = replace(renamed, order=rows, pairs=tuple(Pair(*map(name, pair)) for pair in schedule.pairs))
    check(result)
    return result
