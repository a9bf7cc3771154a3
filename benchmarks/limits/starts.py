"""Orders that need no machine code to be found, beside list scheduling, which does: see README.md.

    python benchmarks/limits/starts.py               with machine code on disk, or the plan has no time for its bound
    python benchmarks/limits/starts.py --readme      writes the table there from starts.json

The problems are those of `run.py`. Every makespan is simulated, and stands over the bound that `ps.plan` proves in
ten seconds with machine code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import run as benchmark

import penstock as ps
from benchmarks.plan.run import draw
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.engine.list_by_values import ListSpace
from penstock.planning.options import limits_of
from penstock.planning.problem import pose
from penstock.planning.search import time_of
from penstock.planning.starts import in_step, list_by_class
from penstock.schedule import one_to_one

LIBRARY = ("1f1b", "zb-h1", "zb")


def over_bound(num_ranks: int, num_microbatches: int) -> dict[str, float | None]:
    """Makespan over the bound by start; None where it holds more than the cap."""
    costs, links = draw(num_ranks, np.random.default_rng([benchmark.SEED, num_ranks]))
    plan = ps.plan(costs, num_ranks, num_microbatches, links, max_in_flight=num_ranks, time_limit=10.0)
    found: dict[str, float | None] = {"plan": plan.gap}
    for name in LIBRARY:
        timeline = ps.simulate(ps.build(name, num_ranks, num_microbatches), costs, links)
        fits = max(timeline.peak_activations) <= num_ranks
        found[name] = timeline.makespan / plan.lower_bound - 1 if fits else None
    limits = limits_of(costs, one_to_one(num_ranks), num_ranks, num_ranks, None, True)
    problem = pose(
        costs, one_to_one(num_ranks), num_ranks, num_microbatches, ps.Links.of(links), limits.held, limits.cap, True,
        [num_microbatches],
    )  # fmt: skip
    for number, row in enumerate(in_step(problem)):
        found[f"in step, {number + 1}"] = time_of(problem, row) / plan.lower_bound - 1
    listed = list_by_class(problem, problem.priority_class, ListSpace.of(problem.queues))
    found["list scheduling"] = listed / plan.lower_bound - 1 if listed >= 0 else None
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


def table(gaps: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The table of README.md."""
    names = [name for name in next(iter(gaps.values())) if name != "plan"]
    body = [[name, *(_shown(each[name]) for each in gaps.values())] for name in names]
    return markdown(["", *gaps], body)


def _shown(gap: float | None) -> str:
    return "too much held" if gap is None else f"{gap:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("starts.json"))
    parser.add_argument("--readme", action="store_true", help="only write the table of README.md")
    asked = parser.parse_args()
    if asked.readme:
        gaps = json.loads(asked.out.read_text())["gaps"]
        write_between(Path(__file__).with_name("README.md"), "starts", table(gaps))
        return
    results: dict[str, Any] = {
        **record(),
        "gaps": {f"{ranks}x{num}": over_bound(ranks, num) for ranks, num in benchmark.SIZES},
    }
    save_summary(asked.out, results)


if __name__ == "__main__":
    main()
