"""The last link of eight ranks 60 ms late: frozen, dispatched and re-planned, on emulated devices. See README.md.

    python benchmarks/late_link/run.py --plan [CASE ...]            plans: runs/late_link/ and plans.json
    python benchmarks/late_link/run.py --emulate [CASE ...]         runs planned cases, and writes results.json
    python benchmarks/late_link/run.py --readme                     writes the README's table from the two files

The first takes about two minutes, the second about nine, of which it mostly sleeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary

FOLDER = Path(__file__).resolve().parent
ORDERS = FOLDER.parents[1] / "runs/late_link"
"""Where the planned orders lie, which git does not keep."""

NUM_RANKS, NUM_MICROBATCHES, MS = 8, 32, 10.0
LATE = ps.Links({(NUM_RANKS - 2, NUM_RANKS - 1): 60.0})
CAPS = (12, 10, 8)
"""Forwards in flight on each rank, their activations freed by W."""
WARMUP = "warm-ups"
"""The case whose ranks hold what the frozen order with warm-ups 2(S - i) - 1 holds, half of it freed by I."""
OFFLOADED, HALVED = "8 and host memory", "8 halved and host memory"
"""Eight activations on each rank and eight more in its host memory: freed by W, and half of each by I."""
HOST = {OFFLOADED: 8.0, HALVED: 8.0}
HOST_MS = 5.0
CASES = (WARMUP, *map(str, CAPS), *HOST)
NAMES = {
    WARMUP: "of warm-ups",
    **{str(cap): f"{cap} in flight" for cap in CAPS},
    OFFLOADED: "8 in flight, 8 in host memory",
    HALVED: "8, half freed by I, 8 in host memory",
}
WAYS = (
    ("undelayed", "without delay", "frozen"),
    ("frozen", "planned without the delay", "frozen"),
    ("hinted", "planned without the delay", "hinted"),
    ("dynamic", "planned without the delay", "dynamic"),
    ("replanned", "planned for it", "frozen"),
    ("replanned, hinted", "planned for it", "hinted"),
)
"""Name, order, dispatch. The first runs without the delay, the others with it."""
NUM_STEPS, STRETCH = 5, 2.0
"""Steps per case and way, of which the median counts; and by how much all of time is slowed down, so that what this
machine adds to each op counts less."""
PLAN_SECONDS, UNDELAYED_SECONDS = 30.0, 5.0


def costs_of(case: str) -> ps.Costs:
    costs = ps.Costs.uniform(NUM_RANKS, MS, MS, MS, freed_by_input=0.5 if case in (WARMUP, HALVED) else 0.0)
    return replace(costs, other={"OFFLOAD": HOST_MS, "RELOAD": HOST_MS}) if case in HOST else costs


def path_of(case: str, delayed: bool) -> Path:
    return ORDERS / f"{case.replace(' ', '-')}-{'late' if delayed else 'undelayed'}.json"


def planned(cases: Sequence[str]) -> dict[str, Any]:
    """The schedules of cases, and the bounds that were proved."""
    found: dict[str, Any] = {}
    ORDERS.mkdir(parents=True, exist_ok=True)
    for case in cases:
        costs = costs_of(case)
        if case == WARMUP:
            before = ps.build("zb", NUM_RANKS, NUM_MICROBATCHES)
            held = list(ps.simulate(before, costs).peak_activations)
            p = ps.plan(costs, NUM_RANKS, NUM_MICROBATCHES, LATE, memory_limit=held, time_limit=PLAN_SECONDS)
        else:
            cap = int(case.split()[0])
            held = [float(cap)] * NUM_RANKS
            limit = {"memory_limit" if case == HALVED else "max_in_flight": cap}
            before = ps.plan(costs, NUM_RANKS, NUM_MICROBATCHES, **limit, time_limit=UNDELAYED_SECONDS).schedule
            p = ps.plan(
                costs, NUM_RANKS, NUM_MICROBATCHES, LATE, **limit, offload=HOST.get(case), time_limit=PLAN_SECONDS
            )
        ps.save(before, path_of(case, delayed=False))
        ps.save(p.schedule, path_of(case, delayed=True))
        found[case] = {"memory_limit": held, "lower_bound": p.lower_bound, "makespan": p.makespan, "how": p.how}
    return found


def emulated(plans: dict[str, Any], cases: Sequence[str]) -> dict[str, Any]:
    """Measured and simulated makespans (ms) of every case and way; the ways take turns, so that what disturbs one
    disturbs them all."""
    found: dict[str, Any] = {}
    for case in cases:
        costs, held = costs_of(case), plans[case]["memory_limit"]
        if not path_of(case, delayed=True).exists():
            raise SystemExit(f"{ORDERS} has no orders of case {case!r}; make them by --plan '{case}'")
        schedules = {delayed: ps.load(path_of(case, delayed)) for delayed in (False, True)}
        rows: dict[str, dict[str, Any]] = {name: {"measured": [], "simulated": 0.0} for name, _, _ in WAYS}
        for _ in range(NUM_STEPS):
            for name, order, dispatch in WAYS:
                run = ps.emulate(
                    schedules[order == "planned for it"],
                    costs,
                    links=ps.Links() if name == "undelayed" else LATE,
                    dispatch=dispatch,
                    memory_limit=None if dispatch == "frozen" else held,
                    stretch=STRETCH,
                )
                rows[name]["measured"].append(round(run.timelines[0].makespan, 2))
                rows[name]["simulated"] = round(run.simulated[0].makespan, 6)
        found[case] = rows
    return found


def medians(results: dict[str, Any], case: str) -> dict[str, float]:
    return {name: statistics.median(row["measured"]) for name, row in results["cases"][case].items()}


def table(plans: dict[str, Any], results: dict[str, Any]) -> str:
    """Medians of the cases that were run; over the undelayed run as measured, over the bound, and simulated."""
    lines = [
        "| memory | order | dispatch | simulated ms | measured ms | over undelayed, measured | over the bound |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for case in (case for case in CASES if case in results["cases"]):
        measured, bound = medians(results, case), plans["cases"][case]["lower_bound"]
        for name, order, dispatch in WAYS:
            ms, over = measured[name], "" if name == "undelayed" else f"{measured[name] / bound - 1:+.1%}"
            simulated = results["cases"][case][name]["simulated"]
            lines.append(
                f"| {NAMES[case]} | {order} | {dispatch} | {simulated:g} | {ms:.0f} | "
                f"{ms / measured['undelayed']:.3f} | {over} |"
            )
    return "\n".join(lines)


def write(path: Path, option: str, here: dict[str, Any], cases: dict[str, Any]) -> None:
    """Writes cases over those in a file, and the commit of each; machine and load are those of the last run."""
    before = json.loads(path.read_text()) if path.exists() else {"cases": {}, "commits": {}}
    found = {
        "command": f"python benchmarks/late_link/run.py {option}",
        "commits": before["commits"] | dict.fromkeys(cases, here["commit"]),
        "machine": here["machine"],
        "load": here["load"],
        "stretch": STRETCH,
        "num_steps": NUM_STEPS,
        "cases": before["cases"] | cases,
    }
    save_summary(path, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", choices=CASES, metavar="CASE")
    parser.add_argument("--emulate", nargs="*", choices=CASES, metavar="CASE")
    parser.add_argument("--readme", action="store_true")
    asked = parser.parse_args()
    here = record()
    plans, results = FOLDER / "plans.json", FOLDER / "results.json"
    if asked.plan is not None:
        write(plans, "--plan", here, planned(asked.plan or CASES))
    if asked.emulate is not None:
        measured = emulated(json.loads(plans.read_text())["cases"], asked.emulate or CASES)
        write(results, "--emulate", here, measured)
    if asked.readme:
        filled = table(json.loads(plans.read_text()), json.loads(results.read_text()))
        write_between(FOLDER / "README.md", "results", filled)


if __name__ == "__main__":
    main()
