"""One microbatch after another, over the same placement: the order of a plain training loop.

It is the order to compare another one with. Between a forward and its backward no other microbatch runs.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule import Op, Schedule, ScheduleError, require_no_updates
from penstock.schedule.op import BACKWARD, FORWARD


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
