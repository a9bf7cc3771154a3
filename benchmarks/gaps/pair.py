"""The gaps of two checkouts side by side: what a change of the planner cost or gained.

    python benchmarks/gaps/pair.py --before CHECKOUT --core 0           all problems, with OR-Tools and without it
    python benchmarks/gaps/pair.py --before CHECKOUT --numbers 0-4      a part of them; the command goes on
    python benchmarks/gaps/pair.py --table                              the tables of README.md, from pair.json

Each checkout plans by its own environment (`.venv/bin/python` in it), in a process that lives as long as the run and
has planned something before it is asked. A problem is planned by one and then at once by the other, in turns the one
and the other first. Each row is in runs/gaps_pair.json as soon as both have planned; pair.json is the summary.
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

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ROWS = ROOT / "runs/gaps_pair.json"
MOST_WORSE = 0.003
"""How much larger a family's mean gap may be."""

WORKER = """
import importlib, json, sys
import numpy as np
import penstock as ps
from penstock.program import placements
from penstock.schedule import circular, one_to_one, v_shape

PLACEMENTS = {
    "one-to-one": one_to_one,
    "V": v_shape,
    "bidirectional": lambda p: placements.bidirectional(one_to_one(p)),
    "circular": lambda p: circular(p, 2 * p),
    "partial freeing": one_to_one,
}
RANKS = (4, 6, 8, 12, 16)
SEED, SECONDS = 12, 10.0

def problem(family, number):
    num_ranks = RANKS[number % len(RANKS)]
    placement = PLACEMENTS[family](num_ranks)
    random = np.random.default_rng([SEED, list(PLACEMENTS).index(family), number])
    f, i, w = (random.uniform(*each, placement.num_stages).tolist() for each in ((90, 110), (90, 130), (70, 110)))
    rank = int(random.integers(num_ranks - 1))
    links = ps.Links({(rank, rank + 1): float(random.uniform(100, 300))})
    if family == "partial freeing":
        return num_ranks, ps.Costs(f, i, w, freed_by_input=0.5), links, placement, {"memory_limit": 0.75 * num_ranks}
    held = 1.5 * num_ranks if placement.num_stages > num_ranks else float(num_ranks)
    return num_ranks, ps.Costs(f, i, w), links, placement, {"max_in_flight": held}

def without_ortools():
    for name in ("order_model", "exact"):
        try:
            module = importlib.import_module("penstock.planning." + name)
        except ImportError:
            continue
        if hasattr(module, "available"):
            module.available = lambda: False

num_ranks, costs, links, placement, cap = problem("V", 0)
ps.plan(costs, num_ranks, 2 * num_ranks, links, placement=placement, time_limit=2.0, seed=0, **cap)
if sys.argv[1] == "without":
    without_ortools()
print("ready", flush=True)
for line in sys.stdin:
    family, number = json.loads(line)
    num_ranks, costs, links, placement, cap = problem(family, number)
    found = ps.plan(
        costs, num_ranks, 2 * num_ranks, links, placement=placement, time_limit=SECONDS, seed=number, **cap
    )
    print(json.dumps([num_ranks, found.value, found.lower_bound, found.seconds]), flush=True)
"""
"""What a process of either checkout runs: the problems of `run.py`, in words that both checkouts know."""

FAMILIES = ("one-to-one", "V", "bidirectional", "circular", "partial freeing")


class Checkout:
    """A process that plans with one checkout's sources and environment."""

    def __init__(self, root: Path, ortools: bool, core: int | None) -> None:
        words = [] if core is None else ["taskset", "-c", str(core)]
        words += [str(root / ".venv/bin/python"), "-c", WORKER, "with" if ortools else "without"]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=_environment(root)
        )
        self._said, self._asked = _pipe(self._process.stdout), _pipe(self._process.stdin)
        assert self._said.readline().strip() == "ready", f"{root}: the planner did not start"

    def plan(self, family: str, number: int) -> dict[str, float]:
        self._asked.write(json.dumps([family, number]) + "\n")
        self._asked.flush()
        num_ranks, value, bound, seconds = json.loads(self._said.readline())
        return {"num_ranks": num_ranks, "value": value, "bound": bound, "seconds": seconds}

    def close(self) -> None:
        self._asked.close()
        self._process.wait()


def _pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}


def _commit(root: Path) -> str:
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def run(before: Path, numbers: range, core: int | None) -> None:
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text()) if ROWS.exists() else []
    known = {(row["family"], row["number"], row["ortools"]) for row in rows}
    for ortools in (True, False):
        missing = [(f, n) for n in numbers for f in FAMILIES if (f, n, ortools) not in known]
        if not missing:
            continue
        both = {"before": Checkout(before, ortools, core), "after": Checkout(ROOT, ortools, core)}
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
    summarize(rows, before, core)


def summarize(rows: list[dict[str, Any]], before: Path, core: int | None) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.common.record import record
    from experiments.common.summary import save_summary

    families = []
    for family in FAMILIES:
        for ortools in (True, False):
            mine = [row for row in rows if row["family"] == family and row["ortools"] == ortools]
            if mine:
                gaps = {name: statistics.fmean(_gap(row[name]) for row in mine) for name in ("before", "after")}
                ratio = statistics.fmean(row["after"]["value"] / row["before"]["value"] for row in mine)
                families.append(
                    {"family": family, "ortools": ortools, "problems": len(mine), **gaps, "after_by_before": ratio}
                )
    command = "python benchmarks/gaps/pair.py --before CHECKOUT" + ("" if core is None else f" --core {core}")
    commits = {"before": _commit(before), "after": _commit(ROOT)}
    save_summary(
        HERE / "pair.json", {**record(), "command": command, "commits": commits, "seed": 12, "rows": families}
    )


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
