"""Where the time of a step goes: main-thread CPU by part, in ours and in torch's, over four gloo processes.

    python benchmarks/runtime/parts.py [--schedule 1f1b] [--size tiny] [--steps 200] [--runs 3] [--out FILE]
    python benchmarks/runtime/parts.py --readme     writes the tables of parts.json and in_turns.json into the page

Ours over shared memory (`host`), ours over gloo and torch's take turns, in processes of their own. The thread's clock
is read before and after each part, which takes about 0.7 us a part: that is taken off the part around. Numbers are
microseconds an op, the mean of the four ranks and the median of the runs; `computation` is the module's forward, the
loss and autograd, as they run between messages, and `alone` what the same takes in a loop of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.runtime import run as runtime
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary

HERE = Path(__file__).parent
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
    from penstock.runtime.execute import executors, step_end, worker
    from penstock.runtime.stage import ops
    from penstock.runtime.stage.ops import StageRunner

    parts.watch(pipeline.Pipeline, "step: set-up, batch, handlers", "step", "zero_grad")
    parts.watch(executors.StepExecutor, "step: set-up, batch, handlers", "run")
    parts.watch(step_end.StepEnd, "step: losses shared", "share")
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
    from benchmarks.runtime.sides import SIZES, ComputeOnlySide, PenstockSide, SideTask, TorchSide

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=4)
    schedule = ps.build(given.schedule, num_ranks=4, num_microbatches=8)
    task, group = SideTask.of(SIZES[given.size], schedule, rank), dist.new_group()
    side: Any = TorchSide(task, group) if given.side == "torch" else PenstockSide(task, group, given.side)

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


SIDES = ("host", "gloo", "torch")
PARTS = {
    "computation": "computation: forward, loss, autograd",
    "alone": "the same in a loop of its own",
    "messages": "messages: packing, sending, waiting, taking",
    "around forward and backward": "around forward and backward",
    "decisions, recording": "decisions, recording",
    "step: set-up, batch, handlers": "step: set-up, batch, handlers, clearing",
    "step: losses shared": "step: losses and digests shared",
}
OURS = tuple(PARTS)[3:]
"""What is neither computation nor messages: Python of the runtime."""


def measured(given: argparse.Namespace, side: str) -> dict[str, float]:
    """One run of a side: microseconds an op by part, the mean of the ranks."""
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, FOLDER: name, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *sys.argv, "--side", side]
        ranks = [subprocess.Popen(command, env={**environment, RANK: str(r)}) for r in range(4)]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit(1)
        rows = [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(4)]
    return {part: mean(row[part] for row in rows) for part in rows[0]}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A column for each side, a row for each part, and the runtime's own Python, summed."""
    sides = {side: [row for row in rows if row["side"] == side] for side in SIDES}

    def cells(name: str, parts: Sequence[str]) -> list[str]:
        found = [name]
        for mine in sides.values():
            there = [[row["us"][part] for part in parts if part in row["us"]] for row in mine]
            found.append(f"{median(map(sum, there)):.0f}" if all(there) else "-")
        return found

    body = [cells(words, [part]) for part, words in PARTS.items()]
    return markdown(
        ["part, us an op", "ours, shared memory", "ours, gloo", "torch's, gloo"],
        [*body, cells("the last four together: Python of the runtime", OURS)],
    )


def beside_torch(transport: str) -> list[str]:
    """The table of in_turns.json for one transport of ours, without the memory that it did not measure."""
    rows = [row for row in json.loads((HERE / "in_turns.json").read_text())["rows"] if row["transport"] == transport]
    lines = [line for line in runtime.table(rows).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    without = cells[0].index("peak memory MiB")
    return [f"| {' | '.join(row[:without] + row[without + 1 :])} |" for row in cells]


def shares_of_torch(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What ours by default, the bare loop and working in turns take per op, as shares of torch's overhead."""
    body = []
    for row in rows:
        if row["transport"] == "host":
            took = row["overhead_us_an_op"]
            shares = (f"{took[side] / took['torch']:.2f}" for side in ("ours", "bare", "in turns"))
            body.append([row["size"], row["schedule"], *shares])
    return markdown(["size", "schedule", "ours by default", "bare loop over gloo", "in turns"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--side", choices=SIDES, help="one side alone")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true", help="write the table into the page, and run nothing")
    given = parser.parse_args()
    if FOLDER in os.environ:
        work(given, int(os.environ[RANK]), Path(os.environ[FOLDER]))
    if given.readme:
        write_between(HERE / "README.md", "parts", table(json.loads((HERE / "parts.json").read_text())["rows"]))
        for transport in ("host", "gloo"):
            write_between(HERE / "README.md", transport, beside_torch(transport))
        in_turns = json.loads((HERE / "in_turns.json").read_text())["rows"]
        write_between(HERE / "README.md", "shares", shares_of_torch(in_turns))
        return
    result, rows = record(), []
    for run in range(given.runs):
        for side in (given.side,) if given.side else SIDES:
            rows.append({"side": side, "run": run, "us": measured(given, side)})
    print("\n".join(table(rows) if given.side is None else [json.dumps(rows, indent=1)]))
    if given.out is not None:
        found = {**result, "schedule": given.schedule, "size": given.size, "rows": rows}
        save_summary(given.out, found)


if __name__ == "__main__":
    main()
