"""Where the time of a step goes: main-thread CPU by part, in ours and in torch's, over four gloo processes.

    python benchmarks/runtime/parts.py [--schedule 1f1b] [--size tiny] [--side host | gloo | torch] [--steps 100]

A clock of the thread is read before and after each part, which takes about 0.7 us a part: that is taken off the part
around. Prints microseconds an op, the mean of the four ranks; `computation` is the module's forward, the loss and
autograd, as they run between messages, and `alone` what the same takes in a loop of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path
from statistics import mean
from typing import Any

CLOCK = 700
"""Nanoseconds that reading the clock twice takes."""
FOLDER, RANK = "PENSTOCK_PARTS_FOLDER", "PENSTOCK_PARTS_RANK"


class Parts:
    """Thread time by part: what a part calls that is a part too counts there alone."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self._inner: list[int] = []

    def watch(self, owner: Any, part: str, *names: str) -> None:
        """Counts functions of a class or module as a part."""
        for name in names:
            setattr(owner, name, self._watched(getattr(owner, name), part))

    def _watched(self, function: Any, part: str) -> Any:
        self.spent.setdefault(part, 0)

        @wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.thread_time_ns()
            self._inner.append(0)
            try:
                return function(*args, **keywords)
            finally:
                took = time.thread_time_ns() - start
                self.spent[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took + CLOCK

        return timed


def watch_ours(parts: Parts, transport: Any) -> None:
    from penstock.dispatch import Dispatcher
    from penstock.runtime import pipeline
    from penstock.runtime.execute import executors, step_result, worker
    from penstock.runtime.stage import ops
    from penstock.runtime.stage.ops import StageRunner

    parts.watch(pipeline.Pipeline, "step: set-up, batch, handlers", "step", "zero_grad")
    parts.watch(executors.StepExecutor, "step: set-up, batch, handlers", "run")
    parts.watch(step_result.StepEnd, "step: losses shared", "share")
    parts.watch(worker.Worker, "decisions, recording", "run_ready", "_run")
    parts.watch(Dispatcher, "decisions, recording", "next", "finish", "arrive")
    parts.watch(StageRunner, "around forward and backward", "forward", "backward", "backward_weight")
    parts.watch(StageRunner, "computation", "_call", "_loss")
    parts.watch(ops, "computation", "run_backward")
    parts.watch(type(transport), "messages", "begin", "end", "send", "take", "arrivals", "wait")


def watch_torch(parts: Parts, side: Any) -> None:
    from torch.distributed.pipelining import schedules, stage

    base = stage._PipelineStageBase
    parts.watch(type(side), "step: set-up, batch, handlers", "run", "clear")
    names = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
    parts.watch(base, "around forward and backward", *names)
    parts.watch(base, "computation", "forward_maybe_with_nosync", "backward_maybe_with_nosync")
    parts.watch(schedules._PipelineSchedule, "computation", "_maybe_compute_loss")
    ops = "get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"
    parts.watch(base, "messages", *ops)
    parts.watch(schedules, "messages", "_batch_p2p", "_wait_batch_p2p")


def work(given: argparse.Namespace, rank: int, folder: Path) -> None:
    """One rank: runs the side and leaves what it found."""
    import torch
    import torch.distributed as dist

    import penstock as ps
    from penstock.bench.sides import SIZES, ComputeOnlySide, PenstockSide, SideTask, TorchSide

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=4)
    schedule = ps.build(given.schedule, num_ranks=4, num_microbatches=8)
    task, group = SideTask.of(SIZES[given.size], schedule, rank), dist.new_group()
    side: Any = TorchSide(task, group) if given.side == "torch" else PenstockSide(task, group, "frozen", given.side)

    def run(one: Any, steps: int) -> float:
        dist.barrier()
        start = time.thread_time_ns()
        for _ in range(steps):
            one.run()
            one.clear()
        return (time.thread_time_ns() - start) / steps

    alone = ComputeOnlySide(task)
    run(alone, 5)
    run(side, 5)
    found = {"alone": run(alone, given.steps), "whole": run(side, given.steps)}
    parts = Parts()
    if given.side == "torch":
        watch_torch(parts, side)
    else:
        watch_ours(parts, side._pipe._local.transport)
    run(side, 3)
    parts.spent = dict.fromkeys(parts.spent, 0)
    run(side, given.steps)
    found |= {part: spent / given.steps for part, spent in parts.spent.items()}
    ops = len(schedule.order[rank])
    (folder / f"{rank}.json").write_text(json.dumps({part: ns / ops / 1e3 for part, ns in found.items()}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--side", default="host")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    if FOLDER in os.environ:
        work(given, int(os.environ[RANK]), Path(os.environ[FOLDER]))
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, FOLDER: name, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**environment, RANK: str(r)}) for r in range(4)]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit(1)
        rows = [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(4)]
    print(f"{given.size} {given.schedule}, {given.side}: main-thread CPU, us an op")
    for part in rows[0]:
        print(f"  {part:32s} {mean(row[part] for row in rows):7.1f}")


if __name__ == "__main__":
    main()
