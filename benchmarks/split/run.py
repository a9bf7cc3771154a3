"""What splitting the backward costs: (I + W) / B, ours beside torch's own, measured in alternation in one run.

    python benchmarks/split/run.py --out FILE.json
    python benchmarks/split/run.py --compiled --out FILE.json       the stage compiled by torch.compile, both ways

B is the plain backward of a stage of pre-norm transformer blocks, I + W the two halves of the same backward.
torch's own are the functions its pipelining package calls for I and W. Each repeat runs the three after one
another, in an order that rotates, and gives one ratio of processor times, each the fastest of a few runs; the table
shows the medians of the ratios. Processor time, because a busy machine shows less in it than in wall time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.runtime.split_backward import SplitStage, Tape, prepare
from penstock.train.start import warm_up_malloc

Row = dict[str, Any]
Timing = tuple[float, float, float]  # forward, first half (or all), second half; ms
BATCH, TOKENS = 2, 64
TORCHS = importlib.import_module("torch.distributed.pipelining._backward")
"""torch's own split, which has no public name."""


class SplitBlock(nn.Module):
    """A pre-norm transformer block: causal attention, and an MLP four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result are (B, T, D)."""
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def run(
    widths: Sequence[int] = (8, 128, 512),
    blocks: Sequence[int] = (1, 4, 16),
    repeats: int = 15,
    compiled: bool = False,
) -> list[Row]:
    """One row for each width and number of blocks: medians over the repeats, in ms."""
    warm_up_malloc()
    sizes = [(width, num_blocks) for width in widths for num_blocks in blocks]
    return [measure(width, num_blocks, repeats, compiled) for width, num_blocks in sizes]


def measure(width: int, num_blocks: int, repeats: int, compiled: bool) -> Row:
    """The three backwards of one stage, `repeats` times in alternation; of a compiled stage torch's has none."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[SplitBlock(width) for _ in range(num_blocks)])
    ours = nn.Sequential(*[SplitBlock(width) for _ in range(num_blocks)])
    ours.load_state_dict(plain.state_dict())
    first: Any = torch.compile(plain) if compiled else plain
    second: Any = torch.compile(ours) if compiled else ours
    report = prepare(second)
    x, g = torch.randn(BATCH, TOKENS, width), torch.randn(BATCH, TOKENS, width)
    ways: dict[str, Callable[[], Timing]] = {
        "plain": lambda: _plain(first, x, g),
        "ours": lambda: _ours(second, report.shared, x, g),
    }
    if not compiled:
        ways["torch"] = lambda: _torch(plain, x, g)
    times: dict[str, list[Timing]] = {name: [] for name in ways}
    inner = _inner(ways["plain"])
    for repeat in range(-1, repeats):
        names = list(ways)
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            gc.disable()
            runs = [ways[name]() for _ in range(inner)]
            gc.enable()
            if repeat >= 0:  # the first is a warm-up
                f, i, w = (min(column) for column in zip(*runs))
                times[name].append((f, i, w))
    row: Row = {"width": width, "blocks": num_blocks, "batch": BATCH, "tokens": TOKENS, "repeats": repeats}
    share = report.shared.share()
    row["compiled"], row["deferred_share"] = compiled, 0.0 if share is None else share.share
    row["b_ms"] = median(i for _, i, _ in times["plain"])
    for name in ("ours", "torch"):
        measured = times.get(name)
        row[f"{name}_i_ms"] = None if measured is None else median(i for _, i, _ in measured)
        row[f"{name}_w_ms"] = None if measured is None else median(w for _, _, w in measured)
        row[f"{name}_ratio"] = (
            None
            if measured is None
            else median((i + w) / b for (_, i, w), (_, b, _) in zip(measured, times["plain"]))
        )
    row["ours_forward_ratio"] = median(f / p for (f, _, _), (p, _, _) in zip(times["ours"], times["plain"]))
    return row


def _plain(stage: nn.Module, x: Tensor, g: Tensor) -> Timing:
    x = x.detach().requires_grad_()
    start = time.process_time()
    y = stage(x)
    forward = time.process_time()
    torch.autograd.backward([y], [g])
    end = time.process_time()
    return (forward - start) * 1e3, (end - forward) * 1e3, 0.0


def _ours(stage: nn.Module, shared: SplitStage, x: Tensor, g: Tensor) -> Timing:
    x = x.detach().requires_grad_()
    start = time.process_time()
    tape = Tape(shared)
    with tape.recording():
        y = stage(x)
    forward = time.process_time()
    tape.backward_input([y], [g])
    middle = time.process_time()
    tape.backward_weight()
    end = time.process_time()
    return (forward - start) * 1e3, (middle - forward) * 1e3, (end - middle) * 1e3


def _torch(stage: nn.Module, x: Tensor, g: Tensor) -> Timing:
    x = x.detach().requires_grad_()
    start = time.process_time()
    y = stage(x)
    forward = time.process_time()
    _, groups = TORCHS.stage_backward_input([y], [g], [x], stage.parameters())
    middle = time.process_time()
    TORCHS.stage_backward_weight(stage.parameters(), groups)
    end = time.process_time()
    return (forward - start) * 1e3, (middle - forward) * 1e3, (end - middle) * 1e3


def _inner(way: Callable[[], Timing]) -> int:
    """So many runs a repeat that it takes about 40 ms, at least three; the fastest of them counts."""
    way()
    start = time.process_time()
    way()
    return max(3, min(50, int(0.04 / (time.process_time() - start))))


def table(rows: Sequence[Row]) -> str:
    """The medians, as Markdown."""
    lines = [
        "| width | blocks | B ms | ours I ms | ours W ms | ours (I+W)/B | torch (I+W)/B | ours F/F |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        peer = "-" if row["torch_ratio"] is None else f"{row['torch_ratio']:.2f}"
        lines.append(
            f"| {row['width']} | {row['blocks']} | {row['b_ms']:.2f} | {row['ours_i_ms']:.2f} "
            f"| {row['ours_w_ms']:.2f} | {row['ours_ratio']:.2f} | {peer} | {row['ours_forward_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[8, 128, 512])
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 4, 16], help="blocks of the stage")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(given.width, given.depth, given.repeats, given.compiled)
    print(table(rows))
    if given.out is not None:
        save_summary(given.out, {**record(), "rows": rows})


if __name__ == "__main__":
    main()
