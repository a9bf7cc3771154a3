"""How long the search of the whole space of programs takes, and how good what it finds is.

The space is FlexPipe's (its Table 5 gives the authors' times) and more: every placement, kind rule and traversal,
gradients separated, over a uniform model (F = I = W), 4 microbatches per rank. Then Tessel's placement with shared
embedding and head, planned from scratch.

    python benchmarks/space/run.py --repeats 1 --out benchmarks/space/results.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.cost import Costs
from penstock.library import ASYNCHRONOUS, SCHEDULES, build
from penstock.planning import plan
from penstock.planning.programs import fold, placements_of, search_space
from penstock.program import placements
from penstock.schedule import Schedule, ScheduleError
from penstock.simulation import simulate

SIZES = (2, 4, 8, 16, 32, 64, 128)
PAPER_SECONDS = {2: 4.73, 4: 8.28, 8: 71.28, 16: 107.34, 32: 534.78}
"""FlexPipe's Table 5, on its authors' machine."""
COMPARED = (2, 4, 8, 16)
MLLM_SIZES = ((2, 16), (4, 16), (8, 32), (16, 64))
"""(ranks, microbatches)."""
STAGES_A_RANK = 4


def searches(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds of the whole search, without a memory limit and with 1F1B's, compiled and warm."""
    search_space(Costs.uniform(2 * STAGES_A_RANK), 2, 8)
    rows = []
    for p in sizes:
        parts = Costs.uniform(STAGES_A_RANK * p)
        for limit in (None, float(STAGES_A_RANK * p)):
            seconds, outcome = _timed(lambda: search_space(parts, p, 4 * p, memory_limit=limit), repeats)  # noqa: B023
            rows.append(
                {
                    "num_ranks": p,
                    "num_microbatches": 4 * p,
                    "memory_limit": limit,
                    "num_tried": outcome.num_tried,
                    "seconds": statistics.median(seconds),
                    "paper_seconds": PAPER_SECONDS.get(p),
                    "best": outcome.best.name,
                    "bubble": outcome.best.makespan - 3 * STAGES_A_RANK * 4 * p,
                }
            )
    return rows


def against_library(sizes: Sequence[int] = COMPARED) -> list[dict[str, Any]]:
    """For each library schedule, the best found in its placement within its memory (ms)."""
    rows = []
    for p in sizes:
        parts = Costs.uniform(STAGES_A_RANK * p)
        shapes = placements_of(p, STAGES_A_RANK * p)
        for name in SCHEDULES:
            schedule = _built(name, p)
            shape = next((k for k, v in shapes.items() if schedule and v == schedule.placement), None)
            if schedule is None or shape is None or name in ASYNCHRONOUS or schedule.stage_graph is not None:
                continue
            timeline = simulate(schedule, fold(parts, schedule.num_stages))
            limit = max(timeline.peak_activations)
            found = search_space(parts, p, 4 * p, memory_limit=limit, shapes=[shape]).best
            rows.append(
                {
                    "num_ranks": p,
                    "library": name,
                    "placement": shape,
                    "memory": limit,
                    "library_ms": timeline.makespan,
                    "found_ms": found.makespan,
                    "found": found.name,
                }
            )
    return rows


def shared_ends(repeats: int) -> list[dict[str, Any]]:
    """Tessel's MLLM (embedding 1 + 1, blocks 1 + 3, head 1 + 1, the ends on all ranks) planned from scratch."""
    rows = []
    for p, n in MLLM_SIZES:
        placement = placements.shared_ends(placements.one_to_one(p))
        costs = Costs([1.0] * (p + 2), [1.0] + [3.0] * p + [1.0], [0.0] * (p + 2))

        def planned(costs: Costs = costs, p: int = p, n: int = n, placement: Any = placement) -> Any:
            return plan(costs, p, n, placement=placement, split=False, time_limit=20.0)

        seconds, found = _timed(planned, repeats)
        rows.append(
            {
                "num_ranks": p,
                "num_microbatches": n,
                "makespan": found.makespan,
                "tessel": 8 * n + 4 * (p - 1),
                "lower_bound": found.lower_bound,
                "seconds": statistics.median(seconds),
            }
        )
    return rows


def _built(name: str, num_ranks: int) -> Schedule | None:
    options = {"num_stages": 2 * num_ranks} if name in ("interleaved-1f1b", "looped-bfs") else {}
    try:
        return build(name, num_ranks, 4 * num_ranks, **options)
    except ScheduleError:  # counts it does not take
        return None


def _timed(call: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    call()
    seconds, result = [], None
    for _ in range(repeats):
        before = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - before)
    return seconds, result


def search_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | microbatches | memory | tried | s | FlexPipe's s | best | bubble ms |",
        "|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for row in rows:
        paper, memory = row["paper_seconds"] or "-", row["memory_limit"] or "any"
        lines.append(
            f"| {row['num_ranks']} | {row['num_microbatches']} | {memory} | {row['num_tried']} | "
            f"{row['seconds']:.3f} | {paper} | {row['best']} | {row['bubble']:g} |"
        )
    return "\n".join(lines)


def library_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | library | placement | memory | library ms | found ms |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['num_ranks']} | {row['library']} | {row['placement']} | {row['memory']:g} | "
            f"{row['library_ms']:g} | {row['found_ms']:g} |"
        )
    return "\n".join(lines)


def shared_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | microbatches | planned | Tessel | lower bound | s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['num_ranks']} | {row['num_microbatches']} | {row['makespan']:g} | {row['tessel']} | "
            f"{row['lower_bound']:g} | {row['seconds']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", action="extend")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is timed, after one to warm up")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sizes = given.ranks or SIZES
    found = {
        "searches": searches(sizes, given.repeats),
        "library": against_library([p for p in COMPARED if p in sizes]),
        "shared_ends": shared_ends(given.repeats),
    }
    tables = search_table(found["searches"]), library_table(found["library"]), shared_table(found["shared_ends"])
    print("\n\n".join(tables))
    if given.out is not None:
        save_summary(given.out, {**record(), **found})


if __name__ == "__main__":
    main()
