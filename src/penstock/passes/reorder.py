"""Other orders of microbatches: other numbers in the same shape, or one microbatch after another.

The plain order is that of a plain training loop, to compare another one with. Between a forward and its backward no
other microbatch runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.schedule import Op, Pair, Schedule, ScheduleError, check, declare_order, require_no_updates
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


def in_plain_order(schedule: Schedule, num_microbatches: int | None = None) -> Schedule:
    """The same stages on the same ranks, with one microbatch after another and whole backwards.

        before   rank 0 | F0 F1 F2 .  I0 W0 I1 W1 I2 W2     after   rank 0 | F0 .  .  B0 F1 .  .  B1 F2 ...
                 rank 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 W2             rank 1 | .  F0 B0 .  .  F1 B1 .  ...

    Ops R are left out, and so are pairs. Gradients are summed in the order of the microbatches.

    Args:
        schedule: a schedule without updates and without registered ops, all of whose stages work on equally many
            microbatches.
        num_microbatches: the first so many of them, all of pipeline 0 if that is one. Default: all.

    Raises:
        ScheduleError: updates or registered ops in the order, or stages that work on different numbers of
            microbatches.

    Examples:
        >>> import penstock as ps
        >>> print(ps.passes.in_plain_order(ps.build("zb-h1", 2, 2)))
        schedule zb-h1-plain: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 .  .  B0 F1 .  .  B1
        rank 1 | .  F0 B0 .  .  F1 B1
    """
    graph, placement = schedule.graph, schedule.placement
    num = schedule.num_microbatches if num_microbatches is None else num_microbatches
    require_no_updates(schedule, "in a plain order microbatches would read other weights")
    if graph.registered:
        kinds = ", ".join(sorted({each.kind for each in graph.registered}))
        raise ScheduleError(
            f"{schedule.name} has ops of registered kinds ({kinds}), whose place in a plain order nobody says; build "
            "it without them",
            rule="options",
        )
    if set(graph.num_microbatches) - {schedule.num_microbatches}:
        raise ScheduleError(
            f"the stages of {schedule.name} work on different numbers of microbatches, which no plain loop does; "
            "build it with one number",
            rule="options",
        )
    pipelines = schedule.microbatch_pipeline[:num] if num > 1 else (0,)
    rows: list[list[Op]] = [[] for _ in range(schedule.num_ranks)]
    stages = range(schedule.num_stages)
    for microbatch, pipeline in enumerate(pipelines):
        for kind, order in ((FORWARD, stages), (BACKWARD, reversed(stages))):
            for stage in order:
                for rank in placement.hosts(pipeline, stage):
                    rows[rank].append(Op(kind, stage, microbatch))
    return replace(
        schedule,
        name=f"{schedule.name}-plain",
        order=tuple(map(tuple, rows)),
        microbatch_pipeline=pipelines,
        max_in_flight=None,
        microbatch_orders=(),
        pairs=(),
    )
