"""What running a schedule costs: ours beside `torch.distributed.pipelining`, in alternation in the same processes.

    python benchmarks/runtime/run.py --rounds 6 --no-memory --out FILE.json

Four gloo processes on loopback run the same GPT, eight microbatches a step. For each size and schedule one launch
times blocks of steps: ours, torch's, then the ranks' forwards and backwards in a bare loop over gloo, in turns and
alone, then the other way round. Times of a step are means over the ranks, the table has the medians over the blocks,
and the ratios are medians of each block's own ratio. What a side takes above the computation alone is its overhead.
Of that, what the computation in turns takes is no runtime's own: a rank that waits for others comes back to cold
caches. What the bare loop takes is the least that a runtime in Python can take over gloo. Peak memory is taken in a
launch of each side by itself: how far the resident memory of a rank rises above where it was before the model was
built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.runtime.rank import RankJob, launch
from benchmarks.runtime.sides import SCHEDULES, SIZES
from experiments.common.record import record
from experiments.common.summary import save_summary

NUM_RANKS = 4
NUM_MICROBATCHES = 8
METRICS = ("main_thread_cpu_ms", "process_cpu_ms", "wall_ms")
SIDES = ("ours", "torch", "bare", "in turns", "alone")
TRANSPORTS = ("host", "gloo")
"""Of ours: the default, and what torch has."""
STEPS = {"tiny": 10, "small": 2}
"""Steps a block, so that a block takes about half a second."""


def run(
    sizes: Sequence[str] = ("tiny", "small"),
    schedules: Sequence[str] = SCHEDULES,
    steps: int | None = None,
    blocks: int = 12,
    transports: Sequence[str] = TRANSPORTS,
    memory: bool = True,
) -> list[dict[str, Any]]:
    """Measures every size under every schedule.

    Args:
        steps: a block; by default `STEPS`.
        transports: of ours, each beside torch's over gloo.
        memory: whether to launch each side by itself, too, for its peak memory.

    Returns:
        A row for each, with medians over the blocks, ratios, and the overhead of an op, a mean over the ranks.
    """
    rows: list[dict[str, Any]] = []
    for transport, size, schedule in product(transports, sizes, schedules):
        num_steps = STEPS[size] if steps is None else steps
        job = RankJob(size, schedule, NUM_RANKS, NUM_MICROBATCHES, SIDES, num_steps, blocks, transport)
        row = _row(job, launch(job))
        if memory:
            row["memory"] = {side: _memory(job, side) for side in ("ours", "torch")}
        rows.append(row)
        ratios = ", ".join(f"{metric} {ratio:.2f}" for metric, ratio in row["ratios"].items())
        print(f"{transport} {size} {schedule}: ours / torch's {ratios}", file=sys.stderr, flush=True)
    return rows


def _row(job: RankJob, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def per_block(side: str, metric: str) -> list[float]:
        return [mean(r["blocks"][b][side][metric] for r in ranks) for b in range(job.blocks)]

    times = {side: {metric: per_block(side, metric) for metric in METRICS} for side in SIDES}
    return {
        "size": job.size,
        **vars(SIZES[job.size]),
        "schedule": job.schedule,
        "transport": job.transport,
        "num_ranks": job.num_ranks,
        "num_microbatches": job.num_microbatches,
        "steps": job.steps,
        "blocks": job.blocks,
        "medians": {s: {m: median(values) for m, values in metrics.items()} for s, metrics in times.items()},
        "ratios": {m: median(a / b for a, b in zip(times["ours"][m], times["torch"][m])) for m in METRICS},
        "overhead_us_an_op": {side: mean(_overhead(rank, side) for rank in ranks) for side in SIDES[:-1]},
        "largest_difference": {
            what: max(r["difference"].get(what, 0.0) for r in ranks) for what in ("loss", "gradient")
        },
    }


def _overhead(rank: dict[str, Any], side: str) -> float:
    """Median main-thread time of an op above its computation's, in microseconds."""
    metric = "main_thread_cpu_ms"
    return median(b[side][metric] - b["alone"][metric] for b in rank["blocks"]) * 1e3 / rank["num_ops"]


def _memory(job: RankJob, side: str) -> dict[str, Any]:
    ranks = launch(replace(job, sides=(side,), steps=3, blocks=1))
    return {"peak_bytes": [r["peak_bytes"] for r in ranks], "read_from": ranks[0]["memory_read_from"]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The medians, as Markdown, a table a transport: ours / torch's = ratio."""
    found = dict.fromkeys(row["transport"] for row in rows)
    return "\n\n".join(_table(t, [row for row in rows if row["transport"] == t]) for t in found)


def _table(transport: str, rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"transport={transport!r} beside torch's gloo:",
        "",
        "| size | schedule | main-thread CPU ms | process CPU ms | wall ms | peak memory MiB "
        "| overhead µs an op | bare loop, µs an op | in turns, µs an op | computation alone, CPU ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ours, torch = row["medians"]["ours"], row["medians"]["torch"]
        cells = [row["size"], row["schedule"]]
        cells += [f"{ours[m]:.1f} / {torch[m]:.1f} = **{row['ratios'][m]:.2f}**" for m in METRICS]
        memory = row.get("memory")
        if memory is None:
            cells.append("-")
        else:
            a, b = (mean(memory[side]["peak_bytes"]) / 2**20 for side in ("ours", "torch"))
            cells.append(f"{a:.1f} / {b:.1f} = **{a / b:.2f}**")
        cells.append(" / ".join(f"{row['overhead_us_an_op'][side]:.0f}" for side in ("ours", "torch")))
        cells += [f"{row['overhead_us_an_op'][side]:.0f}" for side in ("bare", "in turns")]
        cells.append(f"{row['medians']['alone']['main_thread_cpu_ms']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--steps", type=int, help="a block, 10 of tiny and 2 of small without")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-memory", action="store_true", help="do not launch each side alone for its peak memory")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = run(given.gpt, given.schedule, given.steps, given.rounds, given.transport, not given.no_memory)
    print(table(rows))
    if given.out is not None:
        save_summary(given.out, {**record(), "rows": rows})


if __name__ == "__main__":
    main()
