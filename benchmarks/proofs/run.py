"""Small planning problems, each beside an exact solver that shares no code with the planner.

    python benchmarks/proofs/run.py --cases 2000 --out benchmarks/proofs/proofs.json
    python benchmarks/proofs/run.py --case 17                     one case, with all its numbers

Exits with 1 where a bound is above a schedule, a schedule below a bound, or a proved value is not the optimum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pprint import pprint
from typing import Any

import ortools

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from penstock.bench.machine import machine
from proof_cases import GRAPHS, OFFLOADED, Verdict, draw, draw_free, draw_graph, judge, judge_graph


def _judged(given: tuple[int, float, float, bool, bool]) -> Verdict:
    seed, time_limit, seconds, free, offload = given
    family = OFFLOADED[seed % len(OFFLOADED)] if offload else None
    return judge(draw_free(seed, family) if free or offload else draw(seed), time_limit, seconds)


def _judged_graph(given: tuple[int, float, float]) -> tuple[int, str, bool, list[str]]:
    seed, time_limit, seconds = given
    case = draw_graph(seed, GRAPHS[seed % len(GRAPHS)])
    solved, wrong = judge_graph(case, time_limit, seconds)
    return seed, case.family, solved.proved, wrong


def graphs(arguments: argparse.Namespace) -> int:
    """Cases of stages in a graph; what is written says how many of each family are wrong, and which."""
    given = [
        (seed, arguments.time, arguments.solver_seconds)
        for seed in range(arguments.first, arguments.first + arguments.cases)
    ]
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        found = list(pool.map(_judged_graph, given))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    told = {
        "commit": commit,
        "first": arguments.first,
        "planner_seconds": arguments.time,
        "solver_seconds": arguments.solver_seconds,
        "machine": machine() | {"ortools": ortools.__version__},
        "cases": len(found),
        "optimum_known": sum(proved for _, _, proved, _ in found),
        "wrong": sum(bool(wrong) for *_, wrong in found),
        "family": dict(sorted(Counter(family for _, family, _, _ in found).items())),
        "wrong_cases": [{"case": seed, "wrong": wrong} for seed, _, _, wrong in found if wrong],
    }
    print(json.dumps(told))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if told["wrong"] else 0


def counts(verdicts: list[Verdict]) -> dict[str, Any]:
    """How many cases, what became of them, and how far plans are above the optimum where it is known."""
    known = [v for v in verdicts if v.solved.proved and v.value is not None and v.solved.value]
    above = [v.value / v.solved.value - 1 for v in known if v.value is not None and v.solved.value]
    return {
        "cases": len(verdicts),
        "optimum_known": len(known),
        "unsolved": sum(not v.solved.proved for v in verdicts),
        "planner_proved": sum(v.proved for v in verdicts),
        "wrong": sum(bool(v.wrong) for v in verdicts),
        "mean_above_optimum": round(statistics.fmean(above), 5) + 0.0 if above else None,
        "most_above_optimum": round(max(above), 5) + 0.0 if above else None,
    }


def summary(verdicts: list[Verdict], arguments: argparse.Namespace) -> dict[str, Any]:
    groups = {
        name: {key: counts([v for v in verdicts if of(v) == key]) for key in sorted(Counter(of(v) for v in verdicts))}
        for name, of in (
            ("family", lambda v: v.case.family),
            ("objective", lambda v: v.case.instance.objective),
            ("limit", lambda v: v.case.limit),
            ("backward", lambda v: "split" if v.case.split else "whole"),
        )
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "first": arguments.first,
        "planner_seconds": arguments.time,
        "solver_seconds": arguments.solver_seconds,
        "machine": machine() | {"ortools": ortools.__version__},
        "all": counts(verdicts),
        **groups,
        "unsolved_cases": [v.case.seed for v in verdicts if not v.solved.proved],
        "wrong_cases": [{"case": v.case.seed, "wrong": v.wrong} for v in verdicts if v.wrong],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--case", type=int, help="only this seed, with all its numbers")
    parser.add_argument("--time", type=float, default=0.3, help="seconds for the planner")
    parser.add_argument("--solver-seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--free", action="store_true", help="cases in which more than the order is free")
    parser.add_argument("--graphs", action="store_true", help="cases of stages that branch, and of shared stages")
    parser.add_argument("--offload", action="store_true", help="cases in which activations may go to host memory")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.graphs:
        return graphs(arguments)
    if arguments.case is not None:
        verdict = _judged(
            (arguments.case, arguments.time, arguments.solver_seconds, arguments.free, arguments.offload)
        )
        pprint(verdict)
        return 1 if verdict.wrong else 0
    verdicts: list[Verdict] = []
    given = [
        (seed, arguments.time, arguments.solver_seconds, arguments.free, arguments.offload)
        for seed in range(arguments.first, arguments.first + arguments.cases)
    ]
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        for verdict in pool.map(_judged, given):
            verdicts.append(verdict)
            for wrong in verdict.wrong:
                print(f"case {verdict.case.seed}: {wrong}", flush=True)
            if arguments.out is not None and len(verdicts) % 100 == 0:
                arguments.out.write_text(json.dumps(summary(verdicts, arguments), indent=1) + "\n")
    found = summary(verdicts, arguments)
    print(json.dumps(found["all"]))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong_cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
