"""Runs a schedule on the real model, over the ranks that are there, and times whole steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.formats.native import from_json
from penstock.models import GPTConfig
from penstock.runtime.execute.timeline import measured_costs
from penstock.simulation import Timeline
from penstock.train.inputs import Inputs, build_pipeline, device_of
from penstock.train.settings import Settings
from penstock.train.tasks.open import open_task
from penstock.train.tasks.task import Example, TaskData
from penstock.tune.allocated import peak_of_step
from penstock.tune.device import Clock

WARM_UPS = 3


def run(
    settings: Settings, config: GPTConfig | None, task: dict[str, Any], rank: int, meet: Callable[[], None]
) -> dict[str, Any]:
    """Runs steps of `task["schedule"]`, with updates, on every replica of the settings' mesh: of a GPT on random
    tokens, or of the user's own model on their data.

    Ranks start each step together (`meet`), as in training, where a step ends for all ranks at its loss. Returns
    milliseconds and clocks of every step on this rank, the steps' makespans, the most bytes of tensors that one more
    step held, and on rank 0 the mean op times by stage.
    """
    schedule = from_json(task["schedule"])
    model = open_task(settings, schedule)
    data = (
        model.read(None)
        if config is None
        else _random_tokens(config, task["microbatch_size"] * schedule.num_microbatches * settings.dp)
    )
    pipe = build_pipeline(Inputs(settings, schedule, model, data))
    timelines: list[Timeline] = []
    steps: list[float] = []
    clocks: list[dict[str, float | None]] = []
    for number in range(WARM_UPS + task["steps"]):
        batch = data.batches[number]
        meet()
        start, before = time.perf_counter(), Clock.now()
        pipe.step(batch.inputs, batch.targets)
        elapsed, clock = (time.perf_counter() - start) * 1e3, Clock.now().since(before)
        if number >= WARM_UPS:
            steps.append(elapsed)
            clocks.append(clock)
            timelines.append(pipe.timeline())
    costs = measured_costs(timelines)
    batch = data.batches[WARM_UPS + task["steps"]]
    meet()
    peak = peak_of_step(
        lambda: pipe.step(batch.inputs, batch.targets), pipe.parameters(), pipe.optimizer, device_of(settings)
    )
    pipe.close()
    return {
        "steps": steps,
        "clocks": clocks,
        "makespans": [timeline.makespan for timeline in timelines],
        "pipeline_rank": pipe.rank,
        "peak_bytes": peak,
        "ops": {kind: list(getattr(costs, kind)) for kind in "fiwb"} if rank == 0 else None,
        "notices": pipe.notices,
    }


def _random_tokens(config: GPTConfig, num_samples: int) -> TaskData:
    """One batch of random tokens, which is repeated."""
    draws = torch.Generator().manual_seed(1)
    shape = num_samples, config.context
    batch = Example(*(torch.randint(0, config.vocab_size, shape, generator=draws) for _ in range(2)))
    return TaskData("random tokens", "", _RepeatedBatch(batch), [batch])


class _RepeatedBatch:
    """One batch in every step."""

    def __init__(self, batch: Example) -> None:
        self._batch = batch

    def __getitem__(self, step: int) -> Example:
        return self._batch
