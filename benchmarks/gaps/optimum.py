"""What the exact solver says of single problems of this benchmark, given minutes: is the plan loose, or the bound?

    python benchmarks/gaps/optimum.py circular 5 --seconds 600

The solver (`tests/exact_solver.py`) is CP-SAT over one interval per op and shares no code with penstock. Times are
rounded down to whole ms, which makes no schedule longer: so its bound holds for the problem as it is.
Each answer goes into optimum.json, in place of what was there for it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gaps.run import FAMILY_RANKS, PLACEMENTS, family_problem
from exact_solver import Instance, solve
from experiments.common.record import record
from experiments.common.summary import save_summary

RESULTS = Path(__file__).parent / "optimum.json"
SEED = 12


def instance_of(family: str, number: int) -> Instance:
    costs, links, placement, cap = family_problem(family, number, SEED)
    num_ranks = FAMILY_RANKS[number % len(FAMILY_RANKS)]
    delays = {
        (a, b): math.floor(links.delay(a, b)) for a in range(num_ranks) for b in range(num_ranks) if abs(a - b) == 1
    }
    num_stages = placement.num_stages
    (most,) = cap.values()
    return Instance(
        placement.pipelines,
        2 * num_ranks,
        {kind: [math.floor(t) for t in of] for kind, of in (("F", costs.f), ("I", costs.i), ("W", costs.w))},
        delays,
        [2] * num_stages,
        [1 if family == "partial freeing" else 0] * num_stages,
        [round(2 * most)] * num_ranks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(PLACEMENTS))
    parser.add_argument("number", type=int)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    began = time.perf_counter()
    solved = solve(instance_of(given.family, given.number), given.seconds, given.workers)
    row = {
        "family": given.family,
        "number": given.number,
        "value": solved.value,
        "bound": solved.bound,
        "proved": solved.proved,
        "seconds": round(time.perf_counter() - began, 1),
        "workers": given.workers,
        **record(),
    }
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = [each for each in rows if (each["family"], each["number"]) != (given.family, given.number)]
    order = list(PLACEMENTS)
    rows = sorted([*rows, row], key=lambda each: (order.index(each["family"]), each["number"]))
    save_summary(RESULTS, {"rows": rows})
    print(f"{given.family} {given.number}: {solved.bound} to {solved.value}", flush=True)


if __name__ == "__main__":
    main()
