"""One rank of the runtime benchmark, and how all of them are started."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import penstock as ps
from benchmarks.runtime.sides import SIZES, Side, SideTask, builders

WARM_UPS = 3
DEADLINE = 240.0
"""Seconds that a rank waits for the others."""
Metrics = dict[str, float]


@dataclass(frozen=True)
class RankJob:
    """What the ranks of one launch do.

    Attributes:
        sides: which to run; with more than one, in alternation, and those with numbers must agree.
        steps: of one side, one after another, that make a block; blocks: how many each side runs.
        transport: of ours; torch's is gloo.
    """

    size: str
    schedule: str
    num_ranks: int
    num_microbatches: int
    sides: tuple[str, ...]
    steps: int
    blocks: int
    transport: str = "host"


def launch(job: RankJob) -> list[dict[str, Any]]:
    """Runs a job on all its ranks and returns what each found, or raises the error of one that fails."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        torch.multiprocessing.spawn(main, (job, Path(folder)), job.num_ranks)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.num_ranks)]


def work(job: RankJob, rank: int, folder: Path) -> dict[str, Any]:
    """Builds the sides, warms them up, checks that they agree and measures."""
    schedule = ps.build(job.schedule, num_ranks=job.num_ranks, num_microbatches=job.num_microbatches)
    task = SideTask.of(SIZES[job.size], schedule, rank)
    # A group each, so that no side's messages meet another's.
    groups = {name: dist.new_group() for name in ("ours", "torch", "bare")}
    makers = builders(task, groups, job.transport, folder)
    memory = MemoryMeter()
    sides = {name: makers[name]() for name in job.sides}
    for side in sides.values():
        for _ in range(WARM_UPS):
            measure(side, 1)
    differences = difference(sides) if {"ours", "torch"} <= set(sides) else None
    blocks: list[dict[str, Metrics]] = []
    for number in range(job.blocks):
        names = list(sides)
        order = names if number % 2 == 0 else names[::-1]
        measured = {name: measure(sides[name], job.steps) for name in order}
        blocks.append({name: measured[name] for name in names})
    return {
        "rank": rank,
        "num_ops": len(schedule.order[rank]),
        "blocks": blocks,
        "difference": differences,
        "peak_bytes": memory.growth(),
        "memory_read_from": memory.source,
    }


def measure(side: Side, steps: int) -> Metrics:
    """Milliseconds a step, from the moment all ranks are ready."""
    gc.collect()
    dist.barrier()
    wall, main, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(steps):
        side.run()
        side.clear()
    ends = time.perf_counter(), time.thread_time(), time.process_time()
    names = "wall_ms", "main_thread_cpu_ms", "process_cpu_ms"
    return {name: (end - start) * 1e3 / steps for name, start, end in zip(names, (wall, main, process), ends)}


def difference(sides: dict[str, Side]) -> Metrics:
    """Largest differences of loss and gradients between torch's and the other sides', relative to their size.

    Raises RuntimeError where they are more than rounding, or where there is nothing to compare: such sides did
    not run the same thing.
    """
    names = [name for name in ("ours", "torch", "bare") if name in sides]
    losses = {name: sides[name].run() for name in names}
    gradients = {name: sides[name].gradients() for name in names}
    found = {"gradient": 0.0}
    for name in names:
        for a, b in zip(gradients[name], gradients["torch"], strict=True):
            found["gradient"] = max(found["gradient"], float((a - b).norm() / b.norm().clamp(min=1e-12)))
        loss, of_torch = losses[name], losses["torch"]
        if of_torch is not None and loss is not None:
            found["loss"] = max(found.get("loss", 0.0), float(abs(loss - of_torch) / of_torch))
    if not any(gradient.any() for gradient in gradients["torch"]):
        raise RuntimeError("torch's pipelining left no gradients; its times mean nothing")
    for side in sides.values():
        side.clear()
    if max(found.values()) > 1e-4:
        raise RuntimeError(f"the sides differ: {found}; their times can't be compared")
    return found


class MemoryMeter:
    """How much this process's peak resident memory grows from here on.

    The kernel's mark of the peak is reset where /proc/self/clear_refs lets us; otherwise the growth of the
    highest peak ever is taken, which misses what fits under the peak of the imports.
    """

    def __init__(self) -> None:
        self._reset = _reset_peak()
        self.source = "VmHWM, reset" if self._reset else "ru_maxrss"
        self._start = _status("VmRSS") if self._reset else _highest()

    def growth(self) -> int:
        return (_status("VmHWM") if self._reset else _highest()) - self._start


def _reset_peak() -> bool:
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmHWM") <= _status("VmRSS") + (1 << 20)
    except (OSError, ValueError):
        return False


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {field}")


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(rank: int, job: RankJob, folder: Path) -> None:
    """A rank's process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    deadline = timedelta(seconds=DEADLINE)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=job.num_ranks, timeout=deadline)
    (folder / f"{rank}.json").write_text(json.dumps(work(job, rank, folder)))
    dist.barrier()
    os._exit(0)  # Groups of both sides are still there; taking them apart is no part of the benchmark.
