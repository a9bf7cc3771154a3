"""Runs a schedule on the real model, over the ranks that are there, times whole steps and measures their memory.

On a CPU torch's profiler records every allocation and release of a step. What was allocated before, weights and
optimizer state, is added. Message buffers that the runtime keeps outside torch's allocator are not counted.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from penstock.formats.native import from_json
from penstock.runtime.execute.timeline import measured_costs
from penstock.runtime.tensors.dtensor import local
from penstock.simulation import Timeline
from penstock.train.inputs import Inputs, build_pipeline, device_of
from penstock.train.settings import Settings
from penstock.train.tasks.open import open_task
from penstock.tune.device import Clock
from penstock.tune.layers import Texts, read_once

WARM_UPS = 3


def run(
    settings: Settings, task: dict[str, Any], rank: int, meet: Callable[[], None], texts: Texts
) -> dict[str, Any]:
    """Runs steps of `task["schedule"]` on the model's data, with updates, on every replica of the settings' mesh.

    Ranks start each step together (`meet`), as in training, where a step ends for all ranks at its loss. A text in
    `texts` is not read again. Returns
    milliseconds and clocks of every step on this rank, the steps' makespans, the most bytes of tensors that one more
    step held, and on rank 0 the mean op times by stage.
    """
    schedule = from_json(task["schedule"])
    model = open_task(settings, schedule)
    data = read_once(model, settings, texts)
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


def peak_of_step(
    step: Callable[[], object], parameters: Iterable[Tensor], optimizer: Optimizer | None, device: torch.device
) -> int:
    """Runs a step and returns the most bytes of tensors that this rank held meanwhile."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
        step()
    state = [] if optimizer is None else [v for values in optimizer.state.values() for v in values.values()]
    kept = [*parameters, *(value for value in state if isinstance(value, Tensor))]
    parts = [local(each).untyped_storage() for each in kept]
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values()) + _most(noted)


def _most(noted: Any) -> int:
    """The highest sum of what was allocated and released, from the first event on."""
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as name:
        path = Path(name) / "step.json"
        noted.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]")
    return int(max(accumulate((change for _, change in changes), initial=0)))
