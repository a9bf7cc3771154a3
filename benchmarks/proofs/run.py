"""Small planning problems, each beside an exact solver that shares no code with the planner.

    python benchmarks/proofs/run.py --cases 2000 --out benchmarks/proofs/proofs.json
    python benchmarks/proofs/run.py --out benchmarks/proofs/proofs.json --seconds 200   those that begin by then
    python benchmarks/proofs/run.py --case 17                     one case, with all its numbers
    python benchmarks/proofs/run.py readme                        the tables of README.md, from the files beside it

Each case is a line of the file beside --out that ends in .jsonl, so the same command goes on where it was ended.
Exits with 1 where a bound is above a schedule, a schedule below a bound, or a proved value is not the optimum.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from pprint import pprint
from typing import Any

import ortools

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import commit, machine
from experiments.common.summary import save_summary
from proof_cases import (
    GRAPHS,
    OFFLOADED,
    UNEVEN,
    Case,
    GraphCase,
    draw,
    draw_free,
    draw_graph,
    draw_uneven,
    judge,
    judge_graph,
    judge_uneven,
)

FOLDER = Path(__file__).resolve().parent
RESULTS = {"plain": "proofs", "free": "free", "offload": "offload", "graphs": "graphs", "uneven": "uneven"}
"""By kind of case, the name of its files."""


@dataclass(frozen=True)
class Settings:
    """What a run judges, and how long each case has."""

    kind: str
    time: float
    seconds: float
    commit: str


def _case_of(kind: str, seed: int) -> Case | GraphCase:
    if kind == "graphs":
        return draw_graph(seed, GRAPHS[seed % len(GRAPHS)])
    if kind == "uneven":
        return draw_uneven(seed, UNEVEN[seed % len(UNEVEN)])
    if kind == "plain":
        return draw(seed)
    return draw_free(seed, OFFLOADED[seed % len(OFFLOADED)] if kind == "offload" else None)


def _judged(given: tuple[int, Settings]) -> dict[str, Any]:
    """The line of a case."""
    seed, asked = given
    case, load = _case_of(asked.kind, seed), os.getloadavg()[0]
    if isinstance(case, GraphCase):
        found = (judge_uneven if asked.kind == "uneven" else judge_graph)(case, asked.time, asked.seconds)
    else:
        found = judge(case, asked.time, asked.seconds)
    solved = found.solved
    return {
        "case": seed,
        "value": found.value and round(found.value, 6),
        "bound": found.lower_bound and round(found.lower_bound, 6),
        "proved": found.proved,
        "solved": [solved.value, solved.bound, solved.proved],
        "wrong": found.wrong,
        "commit": asked.commit,
        "load": round(load, 1),
    }


def _groups(kind: str, seed: int) -> dict[str, str]:
    """The groups that a case is counted in."""
    case = _case_of(kind, seed)
    if isinstance(case, GraphCase):
        limit = next((name for name in ("max_in_flight", "memory_limit") if name in case.arguments), "none")
        return {"family": case.family, **({"limit": limit} if kind == "uneven" else {})}
    return {
        "family": case.family,
        "objective": case.instance.objective,
        "limit": case.limit,
        "backward": "split" if case.split else "whole",
    }


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many cases, what became of them, and how far plans are above the optimum where it is known."""
    known = [row for row in rows if row["solved"][2]]
    above = [row["value"] / row["solved"][0] - 1 for row in known if row["value"] is not None and row["solved"][0]]
    return {
        "cases": len(rows),
        "optimum_known": len(known),
        "unsolved": len(rows) - len(known),
        "planner_proved": sum(row["proved"] for row in rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        "mean_above_optimum": round(statistics.fmean(above), 5) + 0.0 if above else None,
        "most_above_optimum": round(max(above), 5) + 0.0 if above else None,
    }


def summary(rows: Sequence[dict[str, Any]], asked: Settings) -> dict[str, Any]:
    """Counts of all cases and by group, from the lines."""
    by: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        for name, key in _groups(asked.kind, row["case"]).items():
            by.setdefault(name, {}).setdefault(key, []).append(row)
    loads = [row["load"] for row in rows]
    kind = "" if asked.kind == "plain" else f" --{asked.kind}"
    return {
        "command": f"python benchmarks/proofs/run.py{kind} --cases {len(rows)} --time {asked.time:g} "
        f"--solver-seconds {asked.seconds:g}",
        "commits": dict(Counter(row["commit"] for row in rows)),
        "first": min((row["case"] for row in rows), default=None),
        "planner_seconds": asked.time,
        "solver_seconds": asked.seconds,
        "machine": machine() | {"ortools": ortools.__version__},
        "load": [min(loads), statistics.median(loads), max(loads)] if loads else None,
        "all": counts(rows),
        **{name: {key: counts(of) for key, of in sorted(groups.items())} for name, groups in by.items()},
        "unsolved_cases": [row["case"] for row in rows if not row["solved"][2]],
        "wrong_cases": [{"case": row["case"], "wrong": row["wrong"]} for row in rows if row["wrong"]],
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The tables of README.md: every kind of case, then the parts of the plain and of the uneven ones."""
    lines = ["| cases | number | optimum known | wrong | proved by `plan` | above the optimum: mean | most |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    lines += [_row(kind, found[kind]["all"]) for kind in RESULTS]
    for kind, groups in (("plain", ("family", "limit", "objective")), ("uneven", ("family", "limit"))):
        lines += ["", lines[0].replace("cases", f"{kind} cases", 1), lines[1]]
        for name in groups:
            lines += [_row(_WORDS.get(key, key), of) for key, of in found[kind][name].items()]
    return "\n".join(lines)


_WORDS = {"none": "no cap", "max_in_flight": "cap by count", "memory_limit": "cap by memory", "v": "V"}
_WORDS |= {"table": "irregular tables", "graphs": "stages that branch", "offload": "host memory"}
_WORDS |= {"free": "free forms and deals", "uneven": "uneven microbatches"}


def _row(name: str, of: dict[str, Any]) -> str:
    numbers = [of[key] for key in ("cases", "optimum_known", "wrong", "planner_proved")]
    above = f"{of['mean_above_optimum']:.2%} | {of['most_above_optimum']:.1%}"
    return f"| {_WORDS.get(name, name)} | {' | '.join(f'{number:,}' for number in numbers)} | {above} |"


def found_all() -> dict[str, dict[str, Any]]:
    """The summaries in this folder, by kind of case."""
    return {kind: json.loads((FOLDER / f"{name}.json").read_text()) for kind, name in RESULTS.items()}


def write_readme() -> None:
    """Puts the tables between the two comments of README.md."""
    write_between(FOLDER / "README.md", "results", table(found_all()))


def kept(lines: Path, asked: Settings) -> list[dict[str, Any]]:
    """The cases that earlier runs with the same settings wrote. The first line of a file holds its settings."""
    if not lines.exists():
        lines.write_text(json.dumps(_first_line(asked)) + "\n")
        return []
    first, *rows = (json.loads(line) for line in lines.read_text().splitlines())
    if first != _first_line(asked):
        raise SystemExit(f"{lines} has cases of {first}; give another --out, or its settings")
    return rows


def _first_line(asked: Settings) -> dict[str, Any]:
    return {"kind": asked.kind, "planner_seconds": asked.time, "solver_seconds": asked.seconds}


def run(given: Iterable[int], asked: Settings, num_workers: int, out: Path | None, until: float) -> int:
    """Judges cases, those that are in the lines of `out` already excepted; a summary of all is written at the end.

    Args:
        until: seconds after which no other case begins.
    """
    lines = out.with_suffix(".jsonl") if out is not None else None
    rows = kept(lines, asked) if lines is not None else []
    done = {row["case"] for row in rows}
    left = iter([(seed, asked) for seed in given if seed not in done])
    began = time.perf_counter()
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        running = {pool.submit(_judged, one) for one in islice(left, num_workers)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for one in ended:
                rows.append(one.result())
                for wrong in rows[-1]["wrong"]:
                    print(f"case {rows[-1]['case']}: {wrong}", flush=True)
                if lines is not None:
                    with lines.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
            if time.perf_counter() - began < until:
                running |= {pool.submit(_judged, one) for one in islice(left, len(ended))}
    rows.sort(key=lambda row: int(row["case"]))
    found = summary(rows, asked)
    if out is not None and out.exists() and len(rows) == len(done):  # nothing was run here
        found["machine"] = json.loads(out.read_text())["machine"]
    print(json.dumps(found["all"]))
    if out is not None:
        save_summary(out, found)
    return 1 if found["wrong_cases"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["readme"], help="only write the tables of README.md")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--case", type=int, help="only this seed, with all its numbers")
    parser.add_argument("--time", type=float, default=0.3, help="seconds for the planner")
    parser.add_argument("--solver-seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later than that")
    kinds = parser.add_mutually_exclusive_group()
    for kind, of in (
        ("free", "cases in which more than the order is free"),
        ("graphs", "cases of stages that branch, and of shared stages"),
        ("offload", "cases in which activations may go to host memory"),
        ("uneven", "cases in which each op takes a time and memory of its own"),
    ):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="plain", help=of)
    parser.add_argument("--out", type=Path, help="the summary; the lines of cases go beside it, to .jsonl")
    arguments = parser.parse_args()
    if arguments.what == "readme":
        write_readme()
        return 0
    asked = Settings(arguments.kind, arguments.time, arguments.solver_seconds, commit())
    if arguments.case is not None:
        pprint(_case_of(asked.kind, arguments.case))
        row = _judged((arguments.case, asked))
        pprint(row)
        return 1 if row["wrong"] else 0
    given = range(arguments.first, arguments.first + arguments.cases)
    return run(given, asked, arguments.workers, arguments.out, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
