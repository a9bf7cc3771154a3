"""How many updates ahead of what it reads a microbatch's own update is: what rules that predict weights ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule.op import FORWARD, UPDATE

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule


def updates_ahead(schedule: Schedule, stage: int) -> dict[int, int]:
    """Microbatch -> updates of its copy of the stage after its forward and before the update that gathers it.

        F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...      window 1: F0 0, F1 1 (U0), F2 2 (U0 U1), F3 2 (U1 U2)

    Empty for a schedule without updates. An order that `check` accepts is taken for granted.
    """
    windows = schedule.windows
    ahead: dict[int, int] = {}
    if windows is None:
        return ahead
    for row in schedule.order:
        passed: dict[int, int] = {}
        for op in row:
            if op.stage != stage:
                continue
            pipeline = schedule.pipeline_of(op)
            if op.kind == UPDATE:
                passed[pipeline] = passed.get(pipeline, 0) + 1
            elif op.kind == FORWARD:
                ahead[op.microbatch] = op.microbatch // windows.window - passed.get(pipeline, 0)
    return ahead


def forward_steps(stage: int, num_stages: int, window_size: int) -> int:
    """SpecTrain's s of a forward on stage k of N: floor(k/2) + N - k - 1 microbatches, in whole windows."""
    return (stage // 2 + num_stages - stage - 1) // window_size


def backward_steps(stage: int, window_size: int) -> int:
    """SpecTrain's s of a backward: floor(k/2) microbatches, in whole windows."""
    return stage // 2 // window_size
