"""Runs a schedule on the real model, over the ranks that are there, and times whole steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.formats.native import from_json
from penstock.models import CrossEntropy, GPTConfig, gpt_stage, tied_parameters
from penstock.runtime import Pipeline
from penstock.runtime.arguments import ParallelOptions, PrecisionOptions
from penstock.runtime.execute.timeline import measured_costs
from penstock.simulation import Timeline
from penstock.train.inputs import device_of, optimizer_class
from penstock.train.mesh import mesh_of
from penstock.train.settings import Settings
from penstock.train.tasks.layers import recomputed
from penstock.tune.device import Clock

WARM_UPS = 3


def run(
    settings: Settings, config: GPTConfig, task: dict[str, Any], rank: int, meet: Callable[[], None]
) -> dict[str, Any]:
    """Steps of `task["schedule"]` on every replica of the settings' mesh, on random tokens, with updates.

    Ranks start each step together (`meet`), as they do in training, where a step ends for all at its loss.
    Returns milliseconds and clocks of every step on this rank, the steps' makespans, and on rank 0 the mean op times
    by stage.
    """
    schedule = from_json(task["schedule"])
    parts = ranges(settings.cut or ())
    wrap = recomputed if settings.recompute else None
    pipe = Pipeline(
        [lambda part=part: gpt_stage(config, part, settings.seed, wrap=wrap) for part in parts],  # type: ignore[misc]
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=optimizer_class(settings),
        mesh=mesh_of(settings),
        dispatch=settings.dispatch,
        seed=settings.seed,
        timeout=settings.timeout,
        precision=PrecisionOptions(
            autocast=torch.bfloat16 if settings.precision == "bfloat16" else None, clip_norm=settings.clip or None
        ),
        parallel=ParallelOptions(
            device=device_of(settings), tied=tied_parameters(config), sharding=settings.sharding
        ),
    )
    draws = torch.Generator().manual_seed(1)
    shape = task["microbatch_size"] * schedule.num_microbatches * settings.dp, config.context
    inputs, targets = (torch.randint(0, config.vocab_size, shape, generator=draws) for _ in range(2))
    timelines: list[Timeline] = []
    steps: list[float] = []
    clocks: list[dict[str, float | None]] = []
    for number in range(WARM_UPS + task["steps"]):
        meet()
        start, before = time.perf_counter(), Clock.now()
        pipe.step(inputs, targets)
        elapsed, clock = (time.perf_counter() - start) * 1e3, Clock.now().since(before)
        if number >= WARM_UPS:
            steps.append(elapsed)
            clocks.append(clock)
            timelines.append(pipe.timeline())
    costs = measured_costs(timelines)
    pipe.close()
    return {
        "steps": steps,
        "clocks": clocks,
        "makespans": [timeline.makespan for timeline in timelines],
        "ops": {kind: list(getattr(costs, kind)) for kind in "fiwb"} if rank == 0 else None,
        "notices": pipe.notices,
    }


def ranges(cut: Sequence[int]) -> list[range]:
    """The layers of each stage, from how many each holds."""
    found, start = [], 0
    for count in cut:
        found.append(range(start, start + count))
        start += count
    return found
