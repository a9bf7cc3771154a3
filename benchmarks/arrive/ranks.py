"""Ranks on the hosts of a lab that run schedules in torch's own runtime, with sleep as their computing.

The ranks of a lab start once, and run one job after another. Before each job the parent changes the lab's links:

    parent    links of job 0 | go                     | links of job 1 | go
    rank 0                   | 1 + 3 steps of job 0   |                | 1 + 3 steps of job 1
    rank 1                   | ...                    |                | ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile, record_function

import penstock as ps
from penstock.formats.native import from_json, to_json
from penstock.integrations.torch import PlannedSchedule
from penstock.lab import Lab

NUM_RANKS, STEPS = 4, 3
LEAD = 0.4
"""Seconds from when rank 0 says when a step starts until it does; the latest link must be faster."""


class SleepingStage(PipelineStage):
    """A stage whose ops take at least the milliseconds of their costs."""

    def __init__(self, module: nn.Module, stage: int, costs: ps.Costs) -> None:
        super().__init__(module, stage, costs.num_stages, torch.device("cpu"))
        self.sleeps = {kind: costs.duration(kind, stage) / 1e3 for kind in "FBIW"}

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.sleeps["F"])
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.sleeps["B" if kwargs.get("full_backward", True) else "I"])
        return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.sleeps["W"])
        return super().backward_weight_one_chunk(*args, **kwargs)


def start_together() -> float:
    """Returns on all ranks at one moment; a barrier would let ranks behind the late link start later."""
    moment = torch.tensor([time.time() + LEAD], dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, moment.item() - time.time()))
    return time.time()


def timed_step(step: Callable[[], Any]) -> float:
    """Milliseconds of a step: from when the first rank begins until the last has ended."""
    begun = start_together()
    step()
    spans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (begun, time.time()))
    return 1e3 * (max(end for _, end in spans) - min(start for start, _ in spans))


@dataclass(frozen=True)
class Job:
    """One schedule to run.

    Attributes:
        way: "placed" (PlannedSchedule for gloo), "lowered" (torch places the messages) or "torch" (Schedule1F1B).
        schedule: as text. f, i, w: ms by stage, as torch runs them.
        links: of the lab.
        width: numbers of a message.
        profile: where the profiles of all ranks go; empty for none.
    """

    way: str
    schedule: str
    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    links: Sequence[str] = ()
    width: int = 256
    profile: str = ""

    @property
    def costs(self) -> ps.Costs:
        return ps.Costs(self.f, self.i, self.w, message_bytes=[4.0 * self.width] * len(self.f))

    @classmethod
    def of(cls, way: str, schedule: ps.Schedule, costs: ps.Costs, **options: Any) -> Job:
        return cls(way, to_json(schedule), costs.f, costs.i, costs.w, **options)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def run_rank(folder: Path) -> None:
    """All jobs of a folder, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["PENSTOCK_HOST"]), world_size=NUM_RANKS)
    for number, given in enumerate(json.loads((folder / "jobs.json").read_text())):
        while not (folder / f"go-{number}").exists():
            time.sleep(0.02)
        found = _run_job(Job(**given), folder)
        dist.barrier()  # the profiles of all ranks are written
        if dist.get_rank() == 0:
            (folder / "found.json").write_text(json.dumps(found))
            (folder / "found.json").rename(folder / f"done-{number}")
    dist.destroy_process_group()


def _run_job(job: Job, folder: Path) -> dict[str, Any]:
    schedule, rank = from_json(job.schedule), dist.get_rank()
    stages = [SleepingStage(_Scale(job.width), stage, job.costs) for stage in schedule.stages_of(rank)]
    runtime = _runtime_of(job, schedule, stages, folder)
    x = torch.ones(schedule.num_microbatches, job.width)
    numbers = {stage.stage_index for stage in stages}
    arguments = [x] * (0 in numbers)
    target = x if schedule.num_stages - 1 in numbers else None
    ms = []
    with _profiled(job.profile, rank) as next_step:
        for _ in range(1 + STEPS):
            ms.append(timed_step(partial(runtime.step, *arguments, target=target)))
            next_step()
    rows = getattr(runtime, "pipeline_order_with_comms", None) or {}
    return {"ms": ms[1:], "rows": [",".join(map(str, rows[each])) for each in sorted(rows)]}


def _runtime_of(job: Job, schedule: ps.Schedule, stages: list[Any], folder: Path) -> Any:
    if job.way == "placed":
        return PlannedSchedule(stages, schedule, loss_fn=nn.MSELoss())
    if job.way == "torch":
        stage = stages[0]
        stage.forward_one_chunk = _named(stage.forward_one_chunk, "Forward")
        stage.backward_one_chunk = _named(stage.backward_one_chunk, "Backward")
        return Schedule1F1B(stage, schedule.num_microbatches, nn.MSELoss())
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, nn.MSELoss())
    path = folder / f"rank{dist.get_rank()}.csv"
    ps.save(schedule, path, dialect="torch:compute_only")
    runtime._load_csv(str(path))
    return runtime


def _named(run: Callable[..., Any], word: str) -> Callable[..., Any]:
    """A stage's method under a range of its own, as our tutorial says for Schedule1F1B."""

    def call(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{word} {microbatch}"):
            return run(microbatch, *args, **kwargs)

    return call


@contextmanager
def _profiled(folder: str, rank: int) -> Iterator[Callable[[], object]]:
    """A function to call after each step; with a folder, the steps but the first are in a profile."""
    if not folder:
        yield lambda: None
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    steps = torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1)

    def write(found: Any) -> None:
        found.export_chrome_trace(f"{folder}/rank{rank}.json")

    with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=write) as found:
        yield found.step


def run_jobs(jobs: Sequence[Job], folder: Path, script: str) -> Iterator[dict[str, Any]]:
    """Runs jobs on the ranks of one lab, and gives of each the `ms` of its steps and the `rows` that torch ran.

    Args:
        folder: an empty one. script: run with `--rank FOLDER`, it calls `run_rank`.
    """
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    with Lab(num_hosts=NUM_RANKS, num_nics=1) as lab:
        command = [sys.executable, script, "--rank", str(folder)]
        processes = [lab.start(host, command) for host in range(NUM_RANKS)]
        late: set[tuple[int, int]] = set()
        for number, job in enumerate(jobs):
            links = ps.Links.parse(job.links).conditions
            for pair in late - links.keys():
                lab.link(*pair, "latency:0ms")
            for pair, condition in links.items():
                lab.link(*pair, condition, both=pair[::-1] not in links)
            late = set(links)
            (folder / f"go-{number}").touch()
            done = folder / f"done-{number}"
            while not done.exists():
                if any(process.poll() not in (None, 0) for process in processes):
                    raise SystemExit(f"a rank ended in job {number}")
                time.sleep(0.05)
            yield json.loads(done.read_text())
        for process in processes:
            process.wait(60.0)
