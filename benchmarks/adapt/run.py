"""`--adapt` beside a busy machine and a quiet one: the runs of the README's protocol, and their summary.

    python benchmarks/adapt/run.py --out runs/adapt                             # what is missing of 8 x 20 runs
    python benchmarks/adapt/run.py --out runs/adapt --cells emulated-busy-fault --seeds 3
    python benchmarks/adapt/run.py --out runs/adapt --summary benchmarks/adapt/results.json
    python benchmarks/adapt/run.py --table benchmarks/adapt/results.json        # as in the README

Each run leaves a file CELL/SEED.json in the folder, so that what was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from judge import judge

from experiments.common.record import commit, machine

STEPS, LINKS = 150, ((0, 1), (1, 2), (2, 3))
CELLS = tuple(
    f"{device}-{load}-{fault}"
    for device in ("emulated", "real")
    for load in ("quiet", "busy")
    for fault in ("fault", "none")
)
COMMON = [
    "--schedule",
    "zb",
    "--ranks",
    "4",
    "--microbatches",
    "8",
    "--dispatch",
    "frozen",
    "--adapt",
    "--transport",
    "direct",
    "--steps",
    "150",
    "--json",
]
EMULATED = ["--device", "emulated", "--in-process"]
REAL = ["--preset", "nano", "--evaluate-every", "0", "--save-every", "0", "--sample", "0", "--threads", "1"]
COSTS = {"f": 5, "i": 5, "w": 5}
"""Of the emulated stages (ms)."""
DELAY = {"emulated": 30.0, "real": 60.0}
"""Of the injected fault (ms)."""
MOMENT = {"emulated": (6.0, 9.0), "real": (4.0, 7.0)}
"""Seconds after the start between which the fault begins."""
LIMIT = 300.0
"""Seconds after which a run is ended, and counted as dropped."""
FOREIGN = 0.15
"""Cores that other work may take on average beside a run of a quiet cell."""
TRIES = 5
"""Runs of one seed, the dropped ones among them."""
LAST_ONSET = 140
"""A fault that begins after this step leaves too few to answer it: the run is dropped."""


def fault_of(cell: str, seed: int) -> tuple[tuple[int, int], float, float] | None:
    """The link of a run's fault, its delay (ms) and the moment (s) at which it begins; None for a cell without."""
    device, _, fault = cell.split("-")
    if fault == "none":
        return None
    first, last = MOMENT[device]
    return LINKS[seed % len(LINKS)], DELAY[device], first + (last - first) * (seed * 7 % 20) / 20


def command_of(cell: str, seed: int, out: Path, costs: Path) -> list[str]:
    """The command of a run."""
    device, fault = cell.split("-")[0], fault_of(cell, seed)
    found = [sys.executable, "-m", "penstock", "train", *COMMON, "--out", str(out)]
    found += [*EMULATED, "--costs", str(costs)] if device == "emulated" else [*REAL, "--seed", str(seed)]
    if fault is not None:
        (a, b), ms, moment = fault
        found += ["--link", f"{a}:{b}=latency:steps:0s/0ms,{moment * 1e3:.0f}ms/{ms:.0f}ms"]
    return found


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def busy_seconds() -> float:
    """Seconds of all cores that were not idle since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    ticks = [int(each) for each in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Seconds of cores that children of this process took which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_once(cell: str, seed: int, place: Path) -> dict[str, Any]:
    """One run, judged; `dropped` says why it does not count."""
    out = place / f"run-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    costs = place / "costs.json"
    costs.write_text(json.dumps(COSTS), encoding="utf-8")
    command = command_of(cell, seed, out, costs)
    busy = cell.split("-")[1] == "busy"
    before, own, began = busy_seconds(), own_seconds(), time.time()
    with busy_loops((os.cpu_count() or 1) if busy else 0):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            failed = f"exit code {done.returncode}: {done.stderr[-500:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"not done in {LIMIT:g} s"
    seconds = time.time() - began
    foreign = max(0.0, (busy_seconds() - before) - (own_seconds() - own)) / seconds
    found: dict[str, Any] = {
        "cell": cell,
        "seed": seed,
        "command": [each.replace(str(place), "OUT") for each in command[1:]],
        "seconds": round(seconds, 1),
        "foreign_cores": round(foreign, 3),
        "load": os.getloadavg()[0],
        "commit": commit(),
    }
    if failed:
        return found | {"dropped": failed}
    fault = fault_of(cell, seed)
    control, rows = (
        (out / name).read_text(encoding="utf-8").splitlines() for name in ("control.jsonl", "iterations.jsonl")
    )
    found |= judge(control, rows) if fault is None else judge(control, rows, fault[0], fault[1])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    found |= {"headline": report["steered"]["headline"], "notices": report["notices"]}
    if fault is not None and (found["onset"] is None or found["onset"] > LAST_ONSET):
        found["dropped"] = f"the fault began in step {found['onset']}"
    elif not busy and foreign > FOREIGN:
        found["dropped"] = f"other work took {foreign:.2f} cores"
    return found


def run_seed(cell: str, seed: int, place: Path) -> dict[str, Any]:
    """Runs a seed until a run counts; the dropped ones are kept beside it."""
    dropped = []
    for _ in range(TRIES):
        found = run_once(cell, seed, place)
        if "dropped" not in found:
            break
        dropped.append(
            {name: found.get(name) for name in ("dropped", "seconds", "foreign_cores", "false_ok", "answered")}
        )
    return found | {"reruns": dropped}


def summary(folder: Path, command: str) -> dict[str, Any]:
    """All runs in a folder, by cell, held against what must hold."""
    cells = {}
    for cell in CELLS:
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / cell).glob("seed-*.json"))]
        if rows:
            cells[cell] = of_cell(cell, rows)
    return {
        "command": command,
        "commits": sorted({row["commit"] for each in cells.values() for row in each["runs"]}),
        "machine": machine(),
        "steps": STEPS,
        "cells": cells,
        "holds": len(cells) == len(CELLS) and all(each["holds"] for each in cells.values()),
    }


def of_cell(cell: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One cell: counts, what must hold of it, and a row for each run."""
    counted = [row for row in rows if "dropped" not in row]
    false = [each for row in counted for each in row["false"]]
    found: dict[str, Any] = {
        "num_runs": len(counted),
        "seeds": [row["seed"] for row in counted],
        "without_a_run": [row["seed"] for row in rows if "dropped" in row],
        "reruns": sum(len(row["reruns"]) for row in rows),
        "why_rerun": [f"seed {row['seed']}: {each['dropped'][:120]}" for row in rows for each in row["reruns"]],
        "false_decisions": len(false),
        "false_not_taken_back": sum(not each["ok"] for each in false),
    }
    holds = len(counted) == 20 and all(row["false_ok"] for row in counted)
    if cell.endswith("fault"):
        answered = sum(row["answered"] for row in counted)
        silent = [row["seed"] for row in counted if not row["answered"] and not row["explained"]]
        found |= {"answered": answered, "not_answered_nor_explained": silent}
        needed = {"emulated-quiet-fault": 19, "real-quiet-fault": 16}.get(cell, 0)
        holds = holds and answered >= needed and not silent
    kept = ("seed", "seconds", "foreign_cores", "load", "median_ms", "false", "onset", "made", "ran_from", "answered",
            "reasons", "headline", "commit")  # fmt: skip
    return found | {"holds": holds, "runs": [{name: row.get(name) for name in kept} for row in rows]}


def table(value: Mapping[str, Any]) -> str:
    """A summary as the README's table."""
    lines = [
        "| cell | runs | run again | false decisions | not taken back | answered | steps to decision, to switch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in value["cells"].items():
        decided = [row["made"] - row["onset"] for row in cell["runs"] if row["answered"]]
        ran = [row["ran_from"] - row["onset"] for row in cell["runs"] if row["answered"]]
        after = f"{_spread(decided)}, {_spread(ran)}" if decided else ""
        answered = f"{cell['answered']} of {cell['num_runs']}" if "answered" in cell else ""
        lines.append(
            f"| {name.replace('-', ', ')} | {cell['num_runs']} | {cell['reruns']} | {cell['false_decisions']} "
            f"| {cell['false_not_taken_back']} | {answered} | {after} |"
        )
    return "\n".join(lines)


def _spread(values: Sequence[int]) -> str:
    return f"{median(values):g} ({min(values)} to {max(values)})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/adapt"), help="folder of the runs")
    parser.add_argument("--cells", default=",".join(CELLS), help="comma separated, all where not given")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each cell")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--summary", type=Path, help="write a summary of what is there, and run nothing")
    parser.add_argument("--table", type=Path, help="print a summary as a table, and run nothing")
    given = parser.parse_args(arguments)
    if given.table is not None:
        print(table(json.loads(given.table.read_text(encoding="utf-8"))))
        return 0
    if given.summary is not None:
        value = summary(given.out, f"python benchmarks/adapt/run.py --out OUT --seeds {given.seeds}")
        given.summary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        for cell, each in value["cells"].items():
            said = {name: each[name] for name in each if name not in ("runs", "seeds", "why_rerun")}
            print(cell, json.dumps(said))
        return 0 if value["holds"] else 1
    cells = given.cells.split(",")
    if unknown := [cell for cell in cells if cell not in CELLS]:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(CELLS)}")
    for seed in range(given.first_seed, given.first_seed + given.seeds):  # so that what drifts meets all cells alike
        for cell in cells:
            place = given.out / cell
            place.mkdir(parents=True, exist_ok=True)
            file = place / f"seed-{seed:02d}.json"
            if file.exists():
                continue
            found = run_seed(cell, seed, place)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.replace(file)
            said = {name: found.get(name) for name in ("dropped", "answered", "onset", "made", "ran_from", "reasons")}
            false = [
                (each["made"], each["ran"], each["before"], each["with"], each["ok"])
                for each in found.get("false", [])
            ]
            print(f"{cell} seed {seed}: {found['seconds']} s, false {false}, {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
