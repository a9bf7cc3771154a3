"""How long large schedules take from `build` to a timeline, and how much memory.

    python benchmarks/engine/run.py 128x1024          measures one size, and rewrites its part of results.json
    python benchmarks/engine/run.py 1024x4096
    python benchmarks/engine/run.py --table           prints the table of README.md from results.json

The protocol is in README.md. Every schedule is measured in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary

FOLDER = Path(__file__).parent
PHASES = ("build", "check", "lower", "simulate")
SIZES = {
    "128x1024": {"schedules": ("zb-h1", "1f1b", "interleaved-1f1b", "zb-v"), "repeats": 7},
    "1024x4096": {"schedules": ("zb-h1",), "repeats": 2},
}
"""By ranks and microbatches: what is built, and how many times after once to warm up."""

ONE = """
import gc, json, resource, sys, time
import penstock as ps
from penstock.dispatch import lower
name, num_ranks, num_microbatches, repeats = sys.argv[1], *map(int, sys.argv[2:])


def once(num_ranks, num_microbatches):
    seconds = {}

    def timed(phase, call):
        gc.collect()
        before = time.perf_counter()
        result = call()
        seconds[phase] = time.perf_counter() - before
        return result

    schedule = timed("build", lambda: ps.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    costs = ps.Costs.uniform(schedule.num_stages, f=10, i=10, w=10)
    timed("check", lambda: ps.check(schedule))
    timed("lower", lambda: lower(schedule))
    timeline = timed("simulate", lambda: ps.simulate(schedule, costs))
    facts = {"num_ops": schedule.num_ops, "makespan": timeline.makespan, "bubble_ratio": timeline.bubble_ratio}
    return seconds, facts


once(128, 256)
rows = [once(num_ranks, num_microbatches) for _ in range(repeats)]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({**rows[0][1], "seconds": [row[0] for row in rows], "peak_mib": peak}))
"""


def measured(size: str) -> list[dict[str, Any]]:
    """Seconds of each phase and the peak memory of every schedule of a size."""
    num_ranks, num_microbatches = size.split("x")
    found = []
    for name in SIZES[size]["schedules"]:
        words = [sys.executable, "-c", ONE, name, num_ranks, num_microbatches, str(SIZES[size]["repeats"])]
        here = record()
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found.append({"schedule": name, "size": size, **here, **medians(json.loads(said))})
        print(name, size, *(f"{phase} {found[-1]['seconds'][phase]:.3f}" for phase in PHASES), flush=True)
    return found


def medians(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the median seconds of each phase, of all, and of all but building, in place of every repeat's."""

    def of(*phases: str) -> float:
        return statistics.median(sum(each[phase] for phase in phases) for each in row["seconds"])

    together = {"all but build": of(*PHASES[1:]), "all": of(*PHASES)}
    return {**row, "seconds": {phase: of(phase) for phase in PHASES} | together}


def table(rows: list[dict[str, Any]]) -> str:
    """The table of README.md."""
    lines = [
        "| schedule | ranks x microbatches | ops | build s | check s | lower s | simulate s "
        "| check + lower + simulate s | all s | peak MiB | load | commit |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        each = [f"{row['seconds'][phase]:.3f}" for phase in (*PHASES, "all but build", "all")]
        each.append(f"{row['peak_mib']:.0f}")
        load, commit = row["load"], row["commit"]
        if isinstance(load, list):  # rows from before have the first alone, and a short commit
            load, commit = load[0], commit[:9] + commit[40:]
        each += [f"{load:.1f}", commit]
        lines.append(f"| {row['schedule']} | {row['size']} | {row['num_ops']} | {' | '.join(each)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    results = FOLDER / "results.json"
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    if arguments == ["--table"]:
        print(table(rows))
        return
    for size in arguments or SIZES:
        rows = [row for row in rows if row["size"] != size] + measured(size)
        save_summary(results, {"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
