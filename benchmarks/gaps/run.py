"""The gaps that `ps.plan` proves in ten seconds under tight caps, family by family, with and without OR-Tools.

    python benchmarks/gaps/run.py --numbers 0-4                     problems 0 to 4 of every family
    python benchmarks/gaps/run.py --family V --numbers 0-19         of one family
    python benchmarks/gaps/run.py --numbers 0-4 --without-ortools   as where the extra `exact` is not installed
    python benchmarks/gaps/run.py --bound-again                     today's bounds of the plans that are there already
    python benchmarks/gaps/run.py --table                           prints the table of README.md from results.json

Each problem is written to runs/gaps.json as soon as it is planned, in place of the earlier row for it, so a run may
be cut into slices. results.json has the mean and worst gaps of the problems there. README.md says what is planned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import penstock as ps
from experiments.common.record import commit, record
from experiments.common.summary import save_summary
from penstock.engine.tolerance import EPSILON
from penstock.planning import exact
from penstock.planning.annealing import Threads
from penstock.planning.bounds import work_bound
from penstock.planning.destructive_bound import DestructiveBound
from penstock.planning.options import limits_of
from penstock.planning.problem import pose
from penstock.schedule import Placement, circular, one_to_one, v_shape
from penstock.schedule.placement import bidirectional

RESULTS = Path(__file__).parent / "results.json"
ROWS = Path(__file__).resolve().parents[2] / "runs/gaps.json"
"""A row for each problem, which git does not keep."""
SEED = 12
TARGETS = {"one-to-one": 0.003, "V": 0.015, "bidirectional": 0.04, "circular": 0.04, "partial freeing": 0.01}
"""Mean gaps aimed at."""

FAMILY_RANKS = (4, 6, 8, 12, 16)
"""Numbers of ranks that the problems of a family take in turn."""

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "one-to-one": one_to_one,
    "V": v_shape,
    "bidirectional": lambda num_ranks: bidirectional(one_to_one(num_ranks)),
    "circular": lambda num_ranks: circular(num_ranks, 2 * num_ranks),
    "partial freeing": one_to_one,
}
"""The placement of each family, by the number of ranks."""
FAMILY_SECONDS = 10.0


def family_problem(family: str, number: int, seed: int) -> tuple[ps.Costs, ps.Links, Placement, dict[str, float]]:
    """Costs, links, placement and cap of one problem; p ranks, 2 p microbatches.

    The cap is p stage activations per rank, freed at W; 3 p / 2 with two stages of one pipeline per rank. Where I
    frees half of each it is 3 p / 4 in the same unit.
    """
    num_ranks = FAMILY_RANKS[number % len(FAMILY_RANKS)]
    placement = PLACEMENTS[family](num_ranks)
    random = np.random.default_rng([seed, list(PLACEMENTS).index(family), number])
    ends = ((90, 110), (90, 130), (70, 110))
    f, i, w = (random.uniform(*each, placement.num_stages).tolist() for each in ends)
    rank = int(random.integers(num_ranks - 1))
    links = ps.Links({(rank, rank + 1): float(random.uniform(100, 300))})
    if family == "partial freeing":
        return ps.Costs(f, i, w, freed_by_input=0.5), links, placement, {"memory_limit": 0.75 * num_ranks}
    several = placement.num_stages > num_ranks
    return ps.Costs(f, i, w), links, placement, {"max_in_flight": 1.5 * num_ranks if several else float(num_ranks)}


def planned(family: str, number: int) -> dict[str, Any]:
    costs, links, placement, cap = family_problem(family, number, SEED)
    num_ranks = FAMILY_RANKS[number % len(FAMILY_RANKS)]
    found = ps.plan(
        costs, num_ranks, 2 * num_ranks, links, placement=placement, time_limit=FAMILY_SECONDS, seed=number,
        **cap,  # type: ignore[arg-type]
    )  # fmt: skip
    return {
        "family": family,
        "number": number,
        "num_ranks": num_ranks,
        "ortools": exact.available(),
        "value": found.value,
        "bound": found.lower_bound,
        "gap": found.gap,
        "seconds": found.seconds,
        "how": found.how,
        **record(),
    }


def bounded(family: str, number: int) -> float:
    """The bound by refutation, in a tenth of the time of a plan."""
    costs, links, placement, cap = family_problem(family, number, SEED)
    num_ranks = FAMILY_RANKS[number % len(FAMILY_RANKS)]
    limits = limits_of(costs, placement, num_ranks, cap.get("max_in_flight"), cap.get("memory_limit"), split=True)
    problem = pose(costs, placement, num_ranks, 2 * num_ranks, links, limits.held, limits.cap, split=True)
    search = DestructiveBound(
        problem, work_bound(problem), min(row["value"] for row in rows_of(family, number)), 1e-4
    )
    with Threads(1) as threads:
        threads.run([partial(search.go, threads.stop)], FAMILY_SECONDS / 10)
    return search.bound


def rows_of(family: str, number: int) -> list[dict[str, Any]]:
    return [row for row in all_rows() if (row["family"], row["number"]) == (family, number)]


def all_rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ROWS.read_text()) if ROWS.exists() else []
    return found


def bound_again(family: str, number: int) -> None:
    """Puts today's bound in place of that of the time of the plan, where it is better."""
    bound = bounded(family, number)
    for row in rows_of(family, number):
        if bound > row["bound"]:
            better = {"bound": bound, "gap": row["value"] / bound - 1, "bound_commit": commit()}
            kept(row | better)
            print(f"{family} {number}: gap {row['gap']:.2%}, now {better['gap']:.2%}", flush=True)


def key(row: dict[str, Any]) -> tuple[int, bool, int]:
    return list(PLACEMENTS).index(row["family"]), not row["ortools"], row["number"]


def kept(row: dict[str, Any]) -> None:
    """Puts a row in place of the earlier one of its problem, and the gaps of all rows into results.json."""
    rows = sorted([other for other in all_rows() if key(other) != key(row)] + [row], key=key)
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    save_summary(RESULTS, {**record(), "seed": SEED, "time_limit": FAMILY_SECONDS, "rows": summary(rows)})


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each family, with and without OR-Tools: problems, commits, mean and worst gap, mean gaps by ranks."""
    found = []
    for family in PLACEMENTS:
        for ortools in (True, False):
            mine = [row for row in rows if row["family"] == family and row["ortools"] == ortools]
            if not mine:
                continue
            assert all(row["value"] >= row["bound"] * (1 - EPSILON) for row in mine), "a bound is above its plan"
            by_ranks = {each: [row["gap"] for row in mine if row["num_ranks"] == each] for each in FAMILY_RANKS}
            found.append(
                {
                    "family": family,
                    "ortools": ortools,
                    "problems": len(mine),
                    "mean": statistics.fmean(row["gap"] for row in mine),
                    "worst": max(row["gap"] for row in mine),
                    "by_ranks": {str(each): statistics.fmean(gaps) for each, gaps in by_ranks.items() if gaps},
                    "commits": sorted({row["commit"] for row in mine}),
                }
            )
    return found


def table(rows: list[dict[str, Any]]) -> str:
    ranks = " | ".join(f"{each} ranks" for each in FAMILY_RANKS)
    lines = [
        f"| family | OR-Tools | problems | aim | mean gap | worst | {ranks} |",
        f"|---|---|{'---:|' * (4 + len(FAMILY_RANKS))}",
    ]
    for row in rows:
        by_ranks = [row["by_ranks"].get(str(each)) for each in FAMILY_RANKS]
        cells = " | ".join("-" if gap is None else f"{gap:.2%}" for gap in by_ranks)
        lines.append(
            f"| {row['family']} | {'with' if row['ortools'] else 'without'} | {row['problems']} | "
            f"{TARGETS[row['family']]:.1%} | {row['mean']:.2%} | {row['worst']:.2%} | {cells} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(PLACEMENTS), action="append")
    parser.add_argument("--numbers", default="0-19", help="first and last, as in 0-4")
    parser.add_argument("--without-ortools", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--bound-again", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(RESULTS.read_text())["rows"]))
        return
    if given.without_ortools:
        exact.available = lambda: False
    first, last = map(int, given.numbers.split("-"))
    for family in given.family or PLACEMENTS:
        for number in range(first, last + 1):
            if given.bound_again:
                bound_again(family, number)
                continue
            row = planned(family, number)
            kept(row)
            print(f"{family} {number}: {row['num_ranks']} ranks, gap {row['gap']:.2%}, {row['how']}", flush=True)


if __name__ == "__main__":
    main()
