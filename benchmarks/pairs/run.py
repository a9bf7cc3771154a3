"""Steps of dualpipe-v whose pairs run on two streams of a GPU, against the same order on one stream, in alternation.

    python benchmarks/pairs/run.py --out benchmarks/pairs/one-process.json                four ranks in one process
    python benchmarks/pairs/run.py --processes --out benchmarks/pairs/processes.json      two ranks, a process each
    python benchmarks/pairs/run.py --stage exchange                                       one kind of stage
    python benchmarks/pairs/run.py --table                              prints the table of README.md from both files

What is measured, and what was expected before, is said in README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.record import record
from processes import run_ranks

HERE = Path(__file__).parent
NUM_STAGES, NUM_MICROBATCHES, NUM_BLOCKS, WARM_UP, SEED = 8, 8, 24, 3, 15
FILES = {"one process": "one-process.json", "two processes": "processes.json"}
SIDES = ("two streams", "one stream")


class Compute(nn.Module):
    """Matrices so large that one kernel fills the GPU."""

    def __init__(self, width: int = 4096, inner: int = 8192) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Narrow(nn.Module):
    """Matrices with few rows, one after the other: a kernel takes longer than Python to launch it, and leaves most of
    the GPU free."""

    def __init__(self, width: int = 2048, depth: int = 12) -> None:
        super().__init__()
        self.weight, self.depth = nn.Parameter(torch.randn(width, width) / width**0.5), depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = torch.tanh(x @ self.weight)
        return x


class Recurrent(nn.Module):
    """Small kernels that the library launches by the hundred, each waiting for the one before."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layer = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return x + output


class Launches(nn.Module):
    """Small kernels that Python launches one by one, so that the GPU waits for Python."""

    def __init__(self, width: int = 64, depth: int = 40) -> None:
        super().__init__()
        self.weight, self.depth = nn.Parameter(torch.randn(width, width) / width**0.5), depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = torch.tanh(x @ self.weight)
        return x


class Exchange(nn.Module):
    """Large matrices around what stands for an all-to-all: the activation goes to host memory and comes back, and so
    does its gradient. The copy engines do that, and no multiprocessor."""

    def __init__(self, width: int = 4096, inner: int = 2048) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, inner), nn.Linear(inner, width)
        self.there: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        exchanged: Tensor = ThroughHost.apply(self.before(x), self.there)
        return x + self.after(torch.nn.functional.gelu(exchanged))


class ThroughHost(torch.autograd.Function):
    """To host memory and back, behind what the stream was given before; no thread waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: dict[str, Tensor]) -> Tensor:
        ctx.there = there
        return through(x, there, "activation")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return through(grad, ctx.there, "gradient"), None


def through(x: Tensor, there: dict[str, Tensor], name: str) -> Tensor:
    if name not in there:
        there[name] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    there[name].copy_(x, non_blocking=True)
    return torch.empty_like(x).copy_(there[name], non_blocking=True)


@dataclass(frozen=True)
class Kind:
    """A kind of stage: what makes one, the shape of a microbatch, its type."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype


KINDS = {
    "compute": Kind(Compute, (2048, 4096), torch.bfloat16),
    "narrow": Kind(Narrow, (32, 2048), torch.float32),
    "recurrent": Kind(Recurrent, (32, 96, 256), torch.float32),
    "launches": Kind(Launches, (64, 64), torch.float32),
    "exchange": Kind(Exchange, (4096, 4096), torch.bfloat16),
}


def measured(name: str, num_ranks: int, num_blocks: int, device: str) -> dict[str, Any]:
    """Of both sides the ms of a step, block by block, as this process has them."""
    kind = KINDS[name]
    found: dict[str, Any] = {}
    pairs = ps.build("dualpipe-v", num_ranks, NUM_MICROBATCHES, overlap=True)
    torch.manual_seed(SEED)
    x, y = (torch.randn(NUM_MICROBATCHES * kind.shape[0], *kind.shape[1:]).to(device, kind.dtype) for _ in range(2))
    parallel = ps.ParallelOptions(device=device)
    pipes = {}
    for side, schedule in zip(SIDES, (pairs, ps.passes.separate_pairs(pairs)), strict=True):
        torch.manual_seed(SEED)
        model = nn.Sequential(*(kind.make() for _ in range(NUM_STAGES))).to(device, kind.dtype)
        pipes[side] = ps.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, parallel=parallel)
    try:
        for pipe in pipes.values():
            for _ in range(WARM_UP):
                step(pipe, x, y)
        require_equal(pipes, x, y)
        for side in SIDES:
            found[side] = {"ms": [], "pairs_ms": []}
        for block in range(num_blocks):
            for side in SIDES if block % 2 else reversed(SIDES):
                found[side]["ms"].append(step(pipes[side], x, y))
        for side in SIDES:
            found[side]["pairs_ms"] = time_of_pairs(pipes[side], pairs)
            torch.cuda.reset_peak_memory_stats(device)
            step(pipes[side], x, y)
            found[side]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    finally:
        for pipe in pipes.values():
            pipe.close()
    return found


def step(pipe: ps.Pipeline, x: Tensor, y: Tensor) -> float:
    """Milliseconds of every forward and backward of a batch, with all that the GPU was given."""
    pipe.zero_grad()
    torch.cuda.synchronize()
    start = time.perf_counter()
    pipe.step(x, y, update=False)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def require_equal(pipes: dict[str, ps.Pipeline], x: Tensor, y: Tensor) -> None:
    """Raises RuntimeError where the gradients of the two sides differ in one bit."""
    grads = []
    for pipe in pipes.values():
        step(pipe, x, y)
        grads.append({name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        if not torch.equal(grad, grads[1][name]):
            raise RuntimeError(f"the gradients of {name} differ between two streams and one")


def time_of_pairs(pipe: ps.Pipeline, schedule: ps.Schedule) -> float:
    """Milliseconds of the pairs of the last step, of all ranks together: from the start of the first op of each to
    the end of the last, without waits in between."""
    timeline = pipe.timeline()
    took = {timed.op: timed.end - timed.start for timed in timeline.ops}
    return sum(took[forward] + took[backward] for forward, backward in schedule.pairs)


def of_rank(rank: int, name: str, num_blocks: int) -> dict[str, Any]:
    return measured(name, 2, num_blocks, "cuda:0")


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians of blocks, and the median of the ratio within a block."""
    two, one = (found[side]["ms"] for side in SIDES)
    ratios = [a / b for a, b in zip(two, one, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    pairs = [found[side]["pairs_ms"] for side in SIDES]
    return {
        "ms": {side: round(statistics.median(found[side]["ms"]), 3) for side in SIDES},
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "pairs_ms": {side: round(ms, 3) for side, ms in zip(SIDES, pairs, strict=True)},
        "pairs_ratio": round(pairs[0] / pairs[1], 4),
        "peak_mib": {side: round(found[side]["peak_bytes"] / 2**20, 1) for side in SIDES},
        "blocks": {side: [round(ms, 3) for ms in found[side]["ms"]] for side in SIDES},
    }


def run(kinds: Iterable[str], processes: bool, num_blocks: int) -> dict[str, Any]:
    rows = {}
    for name in kinds:
        if processes:
            outcomes = run_ranks(2, of_rank, name, num_blocks, deadline=120.0)
            if any(outcome.code for outcome in outcomes):
                raise RuntimeError("\n".join(outcome.text for outcome in outcomes))
            found = outcomes[0].value
        else:
            found = measured(name, 4, num_blocks, "cuda:0")
        rows[name] = summary(found)
        print(name, {key: value for key, value in rows[name].items() if key != "blocks"}, flush=True)
    return rows


def facts() -> dict[str, Any]:
    return {**record(), "seed": SEED, "gpu": torch.cuda.get_device_name(0)}


def table() -> str:
    """The results, of both ways to run ranks."""
    lines = [
        "| ranks | stage | ms a step, two streams | one stream | ratio (quartiles) | pairs alone | MiB, two / one |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for where, file in FILES.items():
        if not (HERE / file).exists():
            continue
        for name, row in json.loads((HERE / file).read_text())["rows"].items():
            two, one = (f"{row['ms'][side]:.1f}" for side in SIDES)
            low, high = row["ratio_quartiles"]
            memory = " / ".join(f"{row['peak_mib'][side]:.0f}" for side in SIDES)
            lines.append(
                f"| {where} | {name} | {two} | {one} | **{row['ratio']:.3f}** ({low:.3f} to {high:.3f}) "
                f"| {row['pairs_ratio']:.3f} | {memory} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=[*KINDS], help="one kind of stage alone")
    parser.add_argument("--processes", action="store_true", help="two ranks, a process each, instead of four in one")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="steps of each side")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--table", action="store_true", help="print the table of README.md and run nothing")
    given = parser.parse_args()
    if given.table:
        print(table())
        return
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; a CPU has one stream, and there is nothing to compare")
    start = time.perf_counter()
    known = facts()
    rows = run([given.stage] if given.stage else [*KINDS], given.processes, given.blocks)
    result = {**known, "blocks": given.blocks, "seconds": round(time.perf_counter() - start, 1), "rows": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
