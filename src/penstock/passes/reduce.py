"""Gradient reductions of data parallelism as ops, each as early as its stage's gradients are complete.

    before   rank 1 | F0 F1 B0 B1              stages 1 and 3 on rank 1
    after    rank 1 | ... 3B1 3REDUCE0 1B0 1B1 1REDUCE0

A rank goes on computing while a stage's gradients cross the network; only the last reduction of a step stands alone.
The user's own ops of a rank come before its reductions: they may change gradients.

    after    rank 1 | ... 3B1 1B0 1B1 1CLIP0 3REDUCE0 1REDUCE0
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule import Needs, Op, Registered, Schedule, require_no_updates
from penstock.schedule.async_ops import OFFLOAD, RELOAD

__all__ = ["REDUCE", "add_reductions", "reduced_stages"]

REDUCE = "REDUCE"
"""The kind of op that starts the reduction of a stage's gradients over the replicas of its pipeline."""


def reduced_stages(schedule: Schedule) -> list[int]:
    """Stages whose gradients are complete at one place of one rank's order.

    Not those with several copies, whose gradients are added up first, nor shared stages, nor one of whose backwards
    some are whole and some split: those are reduced when the step is over.
    """
    if schedule.placement.num_pipelines > 1:
        return []
    shared = {stage for stage, _ in schedule.placement.shared}
    kinds: dict[int, set[str]] = {}
    for row in schedule.order:
        for op in row:
            if op.kind in ("B", "W"):
                kinds.setdefault(op.stage, set()).add(op.kind)
    return [stage for stage, found in sorted(kinds.items()) if len(found) == 1 and stage not in shared]


def add_reductions(schedule: Schedule, asynchronous: bool = True) -> Schedule:
    """The schedule with one REDUCE per stage, after the stage's last B or W; all else stays where it is.

    A rank with registered ops, which may change gradients, has its reductions after the last of them. Those that move
    activations to host memory do not count. A schedule that has reductions stays as it is.

    Args:
        schedule: of one replica.
        asynchronous: whether a REDUCE lasts until the sums are there, on a stream beside its rank, as they are to be
            timed; or only starts them, as the runtime has it, which waits for all at the end of a step.

    Raises:
        ScheduleError: the schedule has updates among its ops, each of which would have to reduce on its own.

    Examples:
        >>> import penstock as ps
        >>> [str(op) for op in ps.passes.add_reductions(ps.build("zb-h1", 2, 2)).order[1][-3:]]
        ['1W0', '1W1', '1REDUCE0']
    """
    graph = schedule.graph
    require_no_updates(schedule, "gradients are reduced once a step")
    if any(registered.kind == REDUCE for registered in graph.registered):
        return schedule
    last: dict[int, tuple[int, int]] = {}
    own: list[dict[tuple[str, int], list[int]]] = []  # by rank the numbers of its registered ops
    last_own: list[int] = []  # by rank the step of the last of them
    kinds = {(each.kind, each.stage) for each in graph.registered if each.kind not in (OFFLOAD, RELOAD)}
    for rank, row in enumerate(schedule.order):
        own.append({})
        last_own.append(-1)
        for step, op in enumerate(row):
            if op.kind in ("B", "W"):
                last[op.stage] = rank, step
            elif (op.kind, op.stage) in kinds:
                own[rank].setdefault((op.kind, op.stage), []).append(op.microbatch)
                last_own[rank] = step
    stages = reduced_stages(schedule)
    if not stages:
        return schedule
    after: dict[tuple[int, int], list[int]] = {}
    for stage in sorted(stages, key=lambda stage: last[stage]):
        rank, step = last[stage]
        after.setdefault((rank, max(step, last_own[rank])), []).append(stage)
    order = tuple(
        tuple(
            each
            for step, op in enumerate(row)
            for each in (op, *(Op(REDUCE, stage, 0) for stage in after.get((rank, step), ())))
        )
        for rank, row in enumerate(schedule.order)
    )
    registered = tuple(Registered(REDUCE, stage, 1, asynchronous=asynchronous) for stage in stages)
    needs = []
    for stage in stages:
        rank, step = last[stage]
        count = graph.microbatches_of(stage, schedule.num_microbatches)
        kind = schedule.order[rank][step].kind
        needs.append(Needs((kind, stage), (REDUCE, stage), num_before=count))
        for key, numbers in own[rank].items():
            needs.append(Needs(key, (REDUCE, stage), pairs=tuple((number, 0) for number in sorted(numbers))))
    graph = replace(graph, registered=(*graph.registered, *registered), needs=(*graph.needs, *needs), updates=None)
    return replace(schedule, order=order, stage_graph=graph)
