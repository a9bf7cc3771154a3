"""How fast the planner lists and times ops, and what gaps it proves on random problems.

Problems: one stage per rank, F ~ U[90, 110] ms, I ~ U[90, 130], W ~ U[70, 110], each stage its own, and one
neighbouring link, drawn like the rest, with U[100, 300] ms each way. The tight cap is as many activations in flight
on a rank as there are ranks, freed at W.

    python benchmarks/plan/run.py --only speed --out benchmarks/plan/speed.json
    python benchmarks/plan/run.py --only tight --size 8x32 --instances 5 --seed 1
"""

from __future__ import annotations

import argparse
import resource
import secrets
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.cost import Costs, Links
from penstock.engine.list_by_values import ListSpace
from penstock.planning import plan
from penstock.planning.bounds import jackson_bound
from penstock.planning.problem import Problem, pose
from penstock.planning.search import Search, time_of
from penstock.planning.starts import greedy, list_by_class
from penstock.schedule import one_to_one

SPEED_SIZES = ((8, 32), (32, 128), (128, 1024), (1024, 4096))
"""(ranks, microbatches) of the speeds."""

FREE_SIZES = ((4, 12), (8, 32), (16, 64))
TIGHT_SIZES = ((6, 24, 10.0), (8, 32, 10.0), (16, 64, 10.0), (32, 128, 60.0))
"""Sizes without and with a tight cap; the latter with the seconds for each problem."""

_WITHIN_SECONDS = 1.0
_MOST_REPEATS = 50


def draw(num_ranks: int, random: np.random.Generator) -> tuple[Costs, Links]:
    """One problem of the family."""
    f, i, w = (random.uniform(*ends, num_ranks).tolist() for ends in ((90, 110), (90, 130), (70, 110)))
    rank = int(random.integers(num_ranks - 1))
    return Costs(f, i, w), Links({(rank, rank + 1): float(random.uniform(100, 300))})


def posed(costs: Costs, links: Links, num_microbatches: int, cap: float) -> Problem:
    ranks = costs.num_stages
    return pose(
        costs, one_to_one(ranks), ranks, num_microbatches, links, [(1.0, 0.0)] * ranks, [cap] * ranks, split=True
    )


def speeds(seed: int, seconds: float = 10.0) -> list[dict[str, Any]]:
    """Medians of list scheduling and of timing the order it made, compiled and warm; about `seconds` a size."""
    random, rows = np.random.default_rng(seed), []
    for num_ranks, num_microbatches in SPEED_SIZES:
        problem = posed(*draw(num_ranks, random), num_microbatches, float(num_ranks))
        space = ListSpace.of(problem.queues)
        listed = _timed(lambda: list_by_class(problem, problem.priority_class, space), seconds / 2)  # noqa: B023
        row = space.row
        timed = _timed(lambda: time_of(problem, row), seconds / 2)  # noqa: B023
        rows.append(
            {
                "num_ranks": num_ranks,
                "num_microbatches": num_microbatches,
                "num_ops": problem.queues.num_ops,
                "list_ms": statistics.median(listed),
                "time_ms": statistics.median(timed),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    return rows


def _timed(call: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of each of several calls; the first, which warms caches, is left out where there is time."""
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < 3 or (time.perf_counter() - began < seconds and len(found) <= _MOST_REPEATS):
        before = time.perf_counter()
        call()
        found.append((time.perf_counter() - before) * 1e3)
        if len(found) == 3 and time.perf_counter() - began > seconds:
            break
    return found[1:]


def free(num_instances: int, seed: int) -> Iterator[dict[str, Any]]:
    """Without a memory cap: the gap of bound and list scheduling alone, with their ms, and within a second."""
    for num_ranks, num_microbatches in FREE_SIZES:
        random, instances = np.random.default_rng([seed, num_ranks]), []
        for _ in range(num_instances):
            costs, links = draw(num_ranks, random)
            before = time.perf_counter()
            problem = posed(costs, links, num_microbatches, float("inf"))
            search = Search(problem, jackson_bound(problem))
            greedy(search)
            fast_ms = (time.perf_counter() - before) * 1e3
            found = plan(costs, num_ranks, num_microbatches, links, time_limit=_WITHIN_SECONDS)
            instances.append(
                {
                    "fast_gap": search.value / search.lower_bound - 1,
                    "fast_ms": fast_ms,
                    "gap": found.gap,
                    "seconds": found.seconds,
                    "how": found.how,
                }
            )
        yield {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "cap": None, **over(instances)}


def tight(
    num_instances: int, seed: int, sizes: Sequence[tuple[int, int, float]] = TIGHT_SIZES
) -> Iterator[dict[str, Any]]:
    """With the tight cap: the gap proved in the time given, and how far list scheduling was from that bound."""
    for num_ranks, num_microbatches, seconds in sizes:
        random, instances = np.random.default_rng([seed, num_ranks, 1]), []
        for number in range(num_instances):
            costs, links = draw(num_ranks, random)
            problem = posed(costs, links, num_microbatches, float(num_ranks))
            jackson = jackson_bound(problem)
            listed = list_by_class(problem, problem.priority_class, ListSpace.of(problem.queues))
            found = plan(
                costs, num_ranks, num_microbatches, links, max_in_flight=num_ranks, time_limit=seconds, seed=number
            )
            instances.append(
                {
                    "listed_above_jackson": listed / jackson - 1,
                    "above_jackson": found.makespan / jackson - 1,
                    "gap": found.gap,
                    "seconds": found.seconds,
                    "how": found.how,
                }
            )
        yield {
            "num_ranks": num_ranks,
            "num_microbatches": num_microbatches,
            "cap": num_ranks,
            "time_limit": seconds,
            **over(instances),
        }


def over(instances: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, median and most of every figure of a family's problems, and how often each way made the plan."""
    names = [name for name, value in instances[0].items() if not isinstance(value, str)]
    columns = {name: [one[name] for one in instances] for name in names}
    figures = {
        name: {"mean": statistics.fmean(column), "median": statistics.median(column), "most": max(column)}
        for name, column in columns.items()
    }
    return {"num_problems": len(instances), **figures, "how": dict(Counter(one["how"] for one in instances))}


def speed_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | microbatches | ops | listed ms | timed ms | ns an op | peak MiB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['num_ranks']} | {row['num_microbatches']} | {row['num_ops']} | {row['list_ms']:.4g} | "
            f"{row['time_ms']:.4g} | {row['list_ms'] / row['num_ops'] * 1e6:.0f} | {row['peak_mib']:.0f} |"
        )
    return "\n".join(lines)


def gap_table(families: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | microbatches | cap | problems | first gap | first ms | mean gap | worst | over Jackson | s |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for family in families:
        capped = family["cap"] is not None
        first = (
            f"{family['listed_above_jackson']['mean']:.2%} | -"
            if capped
            else f"{family['fast_gap']['mean']:.3%} | {family['fast_ms']['median']:.2f}"
        )
        above = f"{family['above_jackson']['mean']:.3%}" if capped else "-"
        gap = family["gap"]
        lines.append(
            f"| {family['num_ranks']} | {family['num_microbatches']} | {family['cap'] or 'none'} | "
            f"{family['num_problems']} | {first} | {gap['mean']:.3%} | {gap['most']:.3%} | {above} | "
            f"{family['seconds']['mean']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", required=True, choices=("speed", "free", "tight"))
    parser.add_argument("--instances", type=int, default=20, help="how many random problems of each size")
    parser.add_argument("--size", nargs="+", action="extend", help="of the tight cap: RANKSxMICROBATCHES")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {seed}")
    if given.only == "speed":
        found = {"speeds": speeds(seed)}
        print(speed_table(found["speeds"]))
    else:
        sizes = [each for each in TIGHT_SIZES if given.size is None or f"{each[0]}x{each[1]}" in given.size]
        part = free(given.instances, seed) if given.only == "free" else tight(given.instances, seed, sizes)
        found = {"families": list(part)}
        print(gap_table(found["families"]))
    if given.out is not None:
        save_summary(given.out, {**record(), "seed": seed, **found})


if __name__ == "__main__":
    main()
