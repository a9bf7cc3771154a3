"""The gaps of two checkouts side by side: what a change of the planner cost or gained.

    python benchmarks/gaps/pair.py --before CHECKOUT --core 0           all problems, with OR-Tools and without it
    python benchmarks/gaps/pair.py --before CHECKOUT --numbers 0-4      a part of them; the command goes on
    python benchmarks/gaps/pair.py --table                              the tables of README.md, from pair.json

Each checkout plans by its own environment (`.venv/bin/python` in it), in a process that lives as long as the run and
has planned something before it is asked. The problems are those of `run.py`, handed over as numbers. A problem is
planned by one and then at once by the other, in turns the one and the other first. Each row is in runs/gaps_pair.json
as soon as both have planned; pair.json is the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gaps.run import FAMILY_RANKS, FAMILY_SECONDS, PLACEMENTS, SEED, family_problem
from experiments.common.record import CHECKOUT, commit, record
from experiments.common.summary import save_summary

HERE = Path(__file__).parent
ROWS = CHECKOUT / "runs/gaps_pair.json"
MOST_WORSE = 0.003
"""How much larger a family's mean gap may be."""
WARM_UP = ("V", 0, 2.0)
"""What each process plans before it is asked: a problem, and for how many seconds."""

WORKER = """
import importlib, json, sys
import penstock as ps
from penstock.program import placements
from penstock.schedule import circular, one_to_one, v_shape

PLACEMENTS = {
    "V": v_shape,
    "bidirectional": lambda p: placements.bidirectional(one_to_one(p)),
    "circular": lambda p: circular(p, 2 * p),
}

def without_ortools():
    for name in ("order_model", "exact"):
        try:
            module = importlib.import_module("penstock.planning." + name)
        except ImportError:
            continue
        if hasattr(module, "available"):
            module.available = lambda: False

for line in sys.stdin:
    family, number, ortools, seconds, num_ranks, times, freed, links, cap = json.loads(line)
    if not ortools:
        without_ortools()
    costs = ps.Costs(*times, freed_by_input=freed)
    delays = ps.Links({(a, b): ms for a, b, ms in links})
    where = PLACEMENTS.get(family, one_to_one)(num_ranks)
    found = ps.plan(
        costs, num_ranks, 2 * num_ranks, delays, placement=where, time_limit=seconds, seed=number, **cap
    )
    print(json.dumps([num_ranks, found.value, found.lower_bound, found.seconds]), flush=True)
"""
"""What a process of either checkout runs, in words that both checkouts know."""


class Planner:
    """A process that plans with one checkout's sources and environment."""

    def __init__(self, root: Path, ortools: bool, core: int | None) -> None:
        words = [] if core is None else ["taskset", "-c", str(core)]
        words += [str(root / ".venv/bin/python"), "-c", WORKER]
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )
        self._ortools = ortools
        self.plan(*WARM_UP)

    def plan(self, family: str, number: int, seconds: float = FAMILY_SECONDS) -> dict[str, float]:
        costs, links, _, cap = family_problem(family, number, SEED)
        num_ranks = FAMILY_RANKS[number % len(FAMILY_RANKS)]
        delays = [[a, b, each.latency.at(0.0, "")] for (a, b), each in links.conditions.items()]
        times, freed = [list(costs.f), list(costs.i), list(costs.w)], costs.freed_by_input
        asked = [family, number, self._ortools, seconds, num_ranks, times, freed, delays, cap]
        _pipe(self._process.stdin).write(json.dumps(asked) + "\n")
        _pipe(self._process.stdin).flush()
        num_ranks, value, bound, took = json.loads(_pipe(self._process.stdout).readline())
        return {"num_ranks": num_ranks, "value": value, "bound": bound, "seconds": took}

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()


def _pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def run(before: Path, numbers: range, core: int | None) -> None:
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text()) if ROWS.exists() else []
    known = {(row["family"], row["number"], row["ortools"]) for row in rows}
    for ortools in (True, False):
        missing = [(f, n) for n in numbers for f in PLACEMENTS if (f, n, ortools) not in known]
        if not missing:
            continue
        both = {"before": Planner(before, ortools, core), "after": Planner(CHECKOUT, ortools, core)}
        for turn, (family, number) in enumerate(missing):
            names = ["before", "after"] if turn % 2 else ["after", "before"]
            found = {name: both[name].plan(family, number) for name in names}
            rows.append({"family": family, "number": number, "ortools": ortools, **found})
            ROWS.parent.mkdir(exist_ok=True)
            ROWS.write_text(json.dumps(rows, indent=1) + "\n")
            gaps = [f"{name} {_gap(found[name]):.2%}" for name in ("before", "after")]
            print(f"{family} {number}, {'with' if ortools else 'without'} OR-Tools: {', '.join(gaps)}", flush=True)
        for each in both.values():
            each.close()
    command = "python benchmarks/gaps/pair.py --before CHECKOUT" + ("" if core is None else f" --core {core}")
    commits = {"before": commit(before, ["src"]), "after": commit()}
    summary = {**record(), "command": command, "commits": commits, "seed": SEED, "rows": summary_of(rows)}
    save_summary(HERE / "pair.json", summary)


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each family, with and without OR-Tools: both mean gaps, and the mean ratio of the plans."""
    families = []
    for family in PLACEMENTS:
        for ortools in (True, False):
            mine = [row for row in rows if row["family"] == family and row["ortools"] == ortools]
            if mine:
                gaps = {name: statistics.fmean(_gap(row[name]) for row in mine) for name in ("before", "after")}
                ratio = statistics.fmean(row["after"]["value"] / row["before"]["value"] for row in mine)
                families.append(
                    {"family": family, "ortools": ortools, "problems": len(mine), **gaps, "after_by_before": ratio}
                )
    return families


def _gap(found: dict[str, float]) -> float:
    return found["value"] / found["bound"] - 1


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| family | OR-Tools | problems | before | after | points more | plan after / before |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        more = row["after"] - row["before"]
        name = f"{row['family']} | {'with' if row['ortools'] else 'without'}"
        lines.append(
            f"| {name} | {row['problems']} | {row['before']:.2%} | "
            f"{row['after']:.2%} | {100 * more:+.2f}{' **worse**' if more > MOST_WORSE else ''} | "
            f"{row['after_by_before']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the earlier commit, with its .venv")
    parser.add_argument("--numbers", default="0-19", help="first and last, as in 0-4")
    parser.add_argument("--core", type=int, help="the one core on which both plan (default: any)")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads((HERE / "pair.json").read_text())["rows"]))
        return
    first, last = map(int, given.numbers.split("-"))
    run(given.before.resolve(), range(first, last + 1), given.core)


if __name__ == "__main__":
    main()
