"""The most bytes of tensors that a step holds on one rank: measured by the device or, on a CPU, by torch's profiler.

The profiler records every allocation and release of a step. What was allocated before, weights and optimizer state,
is added. Message buffers that the runtime keeps outside torch's allocator are not counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from penstock.runtime.tensors.dtensor import local

QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment of ranks that are measured. Without it the profiler prints to stderr whenever it starts and stops."""


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
