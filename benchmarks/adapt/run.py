"""The whole loop of `--adapt`, held against an oracle: the runs of the README's protocol, and their summary.

    python benchmarks/adapt/run.py --out runs/adapt                            # the rest of 17 cells x 20 seeds
    python benchmarks/adapt/run.py --out runs/adapt --cells emulated-quiet-none --seeds 2 --any-load
    python benchmarks/adapt/run.py --out runs/adapt --tutorial 20 [--busy 1]   # the tutorial's command
    python benchmarks/adapt/run.py --out runs/adapt --summary                  # results.json, README's tables

Each seed leaves a file CELL/SEED.json in the folder, so that what was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adapt.cells import CALIBRATION, CELLS, CONTROL, MODES, NUM_SEEDS, STEPS, TEXT, WARMUP, Cell
from benchmarks.adapt.judge import ANSWERED, Seed, is_answered, judge_cell, judge_seed
from experiments.common.readme import markdown, write_between
from experiments.common.record import commit, record
from penstock.report.from_logs import read_story

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
ITERATIONS, REPORT = "iterations.jsonl", "report.json"
TUTORIAL = ("--schedule", "zb", "--adapt", "--transport", "direct")
"""The command of docs/tutorials/slow-links.md, with its link."""
TUTORIAL_LINK = (2, 3)
TUTORIAL_FAULT = "2:3=latency:steps:0s/0ms,20s/60ms"
LIMIT = 600.0
"""Seconds after which runs are ended, and count as dropped."""
FOREIGN = 0.15
"""Cores that other work may take on average beside the runs of a quiet cell, or beside those of a busy one."""
ORPHANS_S = 5.0
"""Seconds that processes which a run leaves behind may take to end."""
TAKE_IN = 36
"""Linux's number, in prctl, for taking in processes whose parent has ended."""
TRIES = 3
"""Tries for a seed, the dropped ones among them."""


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
    """Seconds of cores that children of this process took which have ended.

    The server that ranks are forked from ends after the process that started it. So this process takes in what is
    left behind, and waits for it: nobody else would count its time.
    """
    end = time.monotonic() + ORPHANS_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_beside(command: Sequence[str], load: int, any_load: bool = False) -> dict[str, Any]:
    """Runs a command beside busy loops. `dropped`, if it is there, says why it does not count."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(TAKE_IN, 1)
    before, own, began = busy_seconds(), own_seconds(), time.time()
    failed = ""
    with busy_loops(load):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            failed = f"exit code {done.returncode}: {done.stderr[-800:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"not done in {LIMIT:g} s"
    seconds = time.time() - began
    busy = busy_seconds() - before
    foreign = max(0.0, busy - (own_seconds() - own)) / seconds
    if not failed and foreign > FOREIGN and not any_load:
        failed = f"other work took {foreign:.2f} cores"
    found = {"seconds": round(seconds, 1), "foreign_cores": round(foreign, 3), "load": round(os.getloadavg()[0], 2)}
    return {**found, "commit": commit(), **({"dropped": failed} if failed else {})}


def tried(command: Sequence[str], place: Path, load: int, any_load: bool) -> dict[str, Any]:
    """Runs a command until a run counts; `reruns` says why those before it do not."""
    reruns: list[str] = []
    for _ in range(TRIES):
        shutil.rmtree(place, ignore_errors=True)
        found = run_beside(command, load, any_load)
        if "dropped" not in found:
            break
        reruns.append(found["dropped"])
    return {**found, "reruns": reruns}


def run_seed(cell: Cell, seed: int, out: Path, any_load: bool) -> dict[str, Any]:
    """Runs the three modes of a seed, in an order that turns from seed to seed, and judges them."""
    place = out / cell.name / f"run-{seed:02d}"
    modes = MODES[seed % 3 :] + MODES[: seed % 3]
    command = [sys.executable, str(HERE / "ranks.py"), str(place), cell.name, str(seed), ",".join(modes)]
    found = {"cell": cell.name, "seed": seed, **tried(command, place, cell.load, any_load)}
    return (
        found
        if "dropped" in found
        else found | judge_seed(read_seed(place, WARMUP[cell.device])) | {"answer": _said(place)["answer"]}
    )


def _said(place: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((place / "with" / STEPS).read_text(encoding="utf-8"))
    return said


def read_seed(place: Path, warmup: int) -> Seed:
    """The records that the runs of a seed left."""
    oracle, without, adapting = (
        json.loads((place / mode / STEPS).read_text(encoding="utf-8"))["steps"] for mode in MODES
    )
    fault = _said(place)["fault"]
    folder = place / "with"
    control, iterations = ((folder / name).read_text(encoding="utf-8").splitlines() for name in (CONTROL, ITERATIONS))
    page = read_story(control, name="", iterations=iterations)
    return Seed(
        oracle,
        without,
        adapting,
        None if fault is None else (tuple(fault[0]), fault[1], fault[2]),
        control,
        iterations,
        page.saved,
        None if page.saved_about is None else page.saved_about[0],
        warmup=warmup,
    )


def calibrate(device: str, out: Path) -> None:
    """Measures what ops of real compute cost, without a fault and beside nothing, once for a folder."""
    if device == "emulated" or (out / device / CALIBRATION).exists():
        return
    write_text_of(out)
    cell = next(cell for cell in CELLS.values() if cell.device == device)
    place = out / device / "calibrate"
    command = [sys.executable, str(HERE / "ranks.py"), str(place), cell.name, "0", "calibrate"]
    done = run_beside(command, 0, any_load=True)
    if "dropped" in done:
        raise SystemExit(f"{cell.name} could not be calibrated: {done['dropped']}")


def write_text_of(out: Path) -> None:
    """Writes the text that models learn: words, drawn once."""
    draw = random.Random(1)
    words = " ".join(draw.choice(["rank", "stage", "link", "op", "slack", "plan"]) for _ in range(6000))
    out.mkdir(parents=True, exist_ok=True)
    (out / TEXT).write_text(words, encoding="utf-8")


def run_tutorial(number: int, load: int, out: Path, any_load: bool) -> dict[str, Any]:
    """One run of the tutorial's command."""
    place = out / tutorial_name(load) / f"run-{number:02d}"
    command = [sys.executable, "-m", "penstock", "train", *TUTORIAL, "--link", TUTORIAL_FAULT, "--out", str(place)]
    found = {"number": number, **tried([*command, "--json"], place, load, any_load)}
    if "dropped" in found:
        return found
    control, rows = ((place / name).read_text(encoding="utf-8").splitlines() for name in (CONTROL, ITERATIONS))
    report = json.loads((place / REPORT).read_text(encoding="utf-8"))
    return found | {
        "answered": is_answered(control, rows, TUTORIAL_LINK),
        "headline": report["steered"]["headline"],
        "notices": report["notices"],
    }


def tutorial_name(load: int) -> str:
    return f"tutorial-{('quiet', 'busy1', 'busy2')[load]}"


def kept(file: Path, made: Mapping[str, Any]) -> None:
    """Writes a seed's row as a whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seed-*.json"))]


def summary(out: Path) -> dict[str, Any]:
    """All seeds in a folder, by cell, held against what must hold."""
    cells, tutorial, every = {}, {}, []
    for cell in CELLS.values():
        rows = rows_in(out / cell.name)
        counted = [row for row in rows if "dropped" not in row]
        every += rows
        if counted:
            judged = judge_cell(cell.load, bool(cell.fault), cell.lasts, counted)
            cells[cell.name] = {**judged, "reruns": sum(len(row["reruns"]) for row in rows)}
    for load, least in ANSWERED.items():
        rows = rows_in(out / tutorial_name(load))
        counted = [row for row in rows if "dropped" not in row]
        every += rows
        if counted:
            answered = sum(row["answered"] for row in counted)
            missed = [f"fewer than {least} of {NUM_SEEDS} answered"] if answered < least else []
            tutorial[tutorial_name(load)] = {"num_runs": len(counted), "answered": answered, "missed": missed}
    whole = len(cells) == len(CELLS) and all(each["num_seeds"] == NUM_SEEDS for each in cells.values())
    whole = whole and all(each["num_runs"] == NUM_SEEDS for each in tutorial.values()) and len(tutorial) == 2
    found = record() | {"command": "python benchmarks/adapt/run.py --out OUT"}
    if every:
        loads = [row["load"] for row in every]
        found |= {"commit": sorted({row["commit"] for row in every}), "load": [min(loads), max(loads)]}
    is_met = whole and not any(each["missed"] for each in (*cells.values(), *tutorial.values()))
    hours = round(sum(row["seconds"] for row in every) / 3600, 2)
    return {**found, "hours": hours, "is_whole": whole, "holds": is_met, "cells": cells, "tutorial": tutorial}


def to_lines(value: Mapping[str, Any]) -> str:
    """A summary as JSON with one line per cell."""
    lines = []
    for name, part in value.items():
        if name in ("cells", "tutorial") and part:
            inside = ",\n".join(f"  {json.dumps(each)}: {json.dumps(row)}" for each, row in part.items())
            lines.append(f" {json.dumps(name)}: {{\n{inside}\n }}")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(part)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(value: Mapping[str, Any]) -> list[str]:
    """The cells of a summary as the README's table."""
    head = ["cell", "seeds", "recoverable", "recovered of it", "worst run", "answered", "steps to decision, switch",
            "false: decisions, steps, ms", 'page\'s "saved" off by', "missed aims"]  # fmt: skip
    body = []
    for name, cell in value["cells"].items():
        steps = [_number(cell[each]) for each in ("steps_to_decision", "steps_to_switch")]
        body.append(
            [
                _cell_in_words(CELLS[name]),
                str(cell["num_seeds"]),
                _percent(cell["recoverable"]),
                _percent(cell["share"]),
                f"{cell['worst']:+.0%}" if CELLS[name].fault else f"longer by {_percent(cell['longer'])}",
                str(cell["answered"]) if CELLS[name].fault else "",
                ", ".join(steps) if any(steps) else "",
                f"{cell['false']}, {cell['false_steps']}, {cell['false_ms']:.0f}",
                _percent(cell["page_error"]),
                "; ".join(cell["missed"]) or "none",
            ]
        )
    return markdown(head, body) if body else ["No runs yet."]


def tutorial_table(value: Mapping[str, Any]) -> list[str]:
    """The runs of the tutorial's command as the README's table."""
    body = [
        [name.replace("-", ", "), str(each["num_runs"]), str(each["answered"]), "; ".join(each["missed"]) or "none"]
        for name, each in value["tutorial"].items()
    ]
    return markdown(["the tutorial's command", "runs", "answered", "missed aims"], body) if body else ["No runs yet."]


def _cell_in_words(cell: Cell) -> str:
    device = {"emulated": "emulated", "real": "real compute", "ring": "real compute, gradient ring"}[cell.device]
    beside = ("quiet", "beside one busy core", "beside two busy cores")[cell.load]
    if not cell.fault:
        return f"{device}, {beside}, no fault"
    lasts = "to the end" if cell.lasts is None else f"for {cell.lasts} steps"
    return f"{device}, {beside}, {cell.fault.replace(':', ' ')} from second {cell.second} {lasts}"


def _percent(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:.0%} ({values[1]:.0%} to {values[2]:.0%})"


def _number(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:g} ({values[1]:g} to {values[2]:g})"


def write_summary(out: Path) -> dict[str, Any]:
    value = summary(out)
    RESULTS.write_text(to_lines(value), encoding="utf-8")
    write_between(HERE / "README.md", "cells", table(value))
    write_between(HERE / "README.md", "tutorial", tutorial_table(value))
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/adapt"), help="folder of the runs")
    parser.add_argument("--cells", default=",".join(CELLS), help="comma separated; by default all")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="seeds of each cell")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--any-load", action="store_true", help="runs count whatever other work runs beside them")
    parser.add_argument("--tutorial", type=int, default=0, metavar="RUNS", help="run the tutorial's command instead")
    parser.add_argument(
        "--busy", type=int, choices=(0, 1, 2), default=0, help="busy loops beside the tutorial's command"
    )
    parser.add_argument("--summary", action="store_true", help="write the summary of what is there, and run nothing")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    if given.summary:
        value = write_summary(out)
        for name, each in (*value["cells"].items(), *value["tutorial"].items()):
            print(name, json.dumps(each))
        return 0 if value["holds"] else 1
    for number in range(given.tutorial):
        file = out / tutorial_name(given.busy) / f"seed-{number:02d}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = run_tutorial(number, given.busy, out, given.any_load)
            kept(file, made)
            print(json.dumps(made), flush=True)
    if given.tutorial:
        return 0
    names = given.cells.split(",")
    if unknown := [name for name in names if name not in CELLS]:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(CELLS)}")
    for seed in range(given.first_seed, given.first_seed + given.seeds):  # so that what drifts meets all cells alike
        for cell in (CELLS[name] for name in names):
            file = out / cell.name / f"seed-{seed:02d}.json"
            if not file.exists():
                calibrate(cell.device, out)
                made = run_seed(cell, seed, out, given.any_load)
                kept(file, made)
                print(json.dumps(made), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
