"""Programs that offload activations to host memory and take them again, for tests of every tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import penstock as ps
from penstock.schedule import Op
from penstock.schedule.async_ops import with_offload


def offloads(stages: Sequence[int], last: int, time: float = 1.5, share: float = 1.0) -> list[ps.NewOp]:
    """An offload after each forward of some stages, and its reload once the microbatch has reached the last stage."""
    ops = []
    for s in stages:
        out, back = {("F", s): 1}, {("OFFLOAD", s): 1} | ({("F", last): 1} if last != s else {})
        ops.append(ps.NewOp("OFFLOAD", s, out, time=time, holds=-share, asynchronous=True))
        ops.append(ps.NewOp("RELOAD", s, back, {("B", s): 1}, time=time, holds=share, asynchronous=True))
    return ops


def offloading(
    placement: ps.Placement, num_microbatches: int, limit: float | None, stages: Sequence[int], **options: object
) -> ps.Program:
    """A program whose ranks hold at most `limit` stage activations and give those of some stages away meanwhile."""
    ops = offloads(stages, placement.num_stages - 1, **options)  # type: ignore[arg-type]
    return ps.Program(placement, num_microbatches, ps.Rules(max_in_flight=limit), ops=ops, name="offloading")


def offloaded(schedule: ps.Schedule, every: int = 1) -> ps.Schedule:
    """Every so many microbatches go away after each forward and come back right before the backward, but for those of
    stages that ranks share."""
    shared = {stage for stage, _ in schedule.placement.shared}
    rows = []
    for row in schedule.order:
        made: list[Op] = []
        for op in row:
            away = op.microbatch % every == 0 and op.stage not in shared
            if op.kind in "BI" and away:
                made.append(Op("RELOAD", op.stage, op.microbatch))
            made.append(op)
            if op.kind == "F" and away:
                made.append(Op("OFFLOAD", op.stage, op.microbatch))
        rows.append(tuple(made))
    return with_offload(replace(schedule, order=tuple(rows)))


def held_at_most(timeline: ps.Timeline, costs: ps.Costs) -> list[float]:
    """Of each rank, counted from when ops ran: the work of the simulator done again, another way."""
    holds = timeline.schedule.graph.holds
    peaks = []
    for row, stream in zip(timeline.rows, timeline.streams, strict=True):
        changes = []
        for timed in (*row, *stream):
            change = costs.memory_change(timed.op.kind, timed.op.stage)
            change += holds.get(timed.op[:2], 0.0) * costs.activation[timed.op.stage]
            changes.append((timed.start if change > 0 else timed.end, change))
        held = peak = 0.0
        for _, change in sorted(changes):  # what is given back at a moment goes before what is taken
            held += change
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
