"""Gradient reductions of data parallelism as ops, each as early as its stage's gradients are complete.

    before   rank 1 | F0 F1 B0 B1              stages 1 and 3 on rank 1
    after    rank 1 | ... 3B1 3REDUCE0 1B0 1B1 1REDUCE0

A rank goes on computing while a stage's gradients cross the network; only the last reduction of a step stands alone.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule import Needs, Op, Registered, Schedule, ScheduleError

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

    A schedule that has them stays as it is.

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
    if schedule.updates is not None:
        raise ScheduleError(
            f"{schedule.name} has its updates in the order, and gradients are reduced once a step; use a schedule "
            "without updates as ops",
            rule="updates",
        )
    if any(registered.kind == REDUCE for registered in graph.registered):
        return schedule
    last: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.order):
        for step, op in enumerate(row):
            if op.kind in ("B", "W"):
                last[op.stage] = rank, step
    stages = reduced_stages(schedule)
    if not stages:
        return schedule
    after = {last[stage]: stage for stage in stages}
    order = tuple(
        tuple(
            each
            for step, op in enumerate(row)
            for each in ((op, Op(REDUCE, after[rank, step], 0)) if (rank, step) in after else (op,))
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
    graph = replace(graph, registered=(*graph.registered, *registered), needs=(*graph.needs, *needs), updates=None)
    return replace(schedule, order=order, stage_graph=graph)
