"""Whether planning has become slower: `penstock bench plan` and `bench space` of two checkouts, in alternation.

    python benchmarks/plan/before.py BEFORE speed     list scheduling, and the timing of its order
    python benchmarks/plan/before.py BEFORE free      posing, bound and first schedule; plans within a second
    python benchmarks/plan/before.py BEFORE tight     gaps within ten seconds under a tight cap, 8 x 32
    python benchmarks/plan/before.py BEFORE space     the whole space of programs, of 2 to 64 ranks
    python benchmarks/plan/before.py BEFORE space 1   only the next run, of this checkout or that one
    python benchmarks/plan/before.py --table          the tables of the READMEs, from the results

BEFORE is the path of a checkout of the commit to compare with, whose numba code lies in its own folders. Each call
runs this checkout and that one in the order of `ORDER`, in processes of their own; nothing is compiled meanwhile, if
each part has been run once before. Runs are added to those that are in the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

FOLDER = Path(__file__).resolve().parent
NOW = FOLDER.parent.parent
ORDER = ("before", "now", "now", "before")
PARTS = {
    "speed": ("plan", "--only", "speed", "--seed", "7"),
    "free": ("plan", "--only", "free", "--instances", "10", "--seed", "7"),
    "tight": ("plan", "--only", "tight", "--size", "8x32", "--instances", "4", "--seed", "7"),
    "space": (
        "space",
        "--repeats",
        "1",
        *(word for ranks in (2, 4, 8, 16, 32, 64) for word in ("--ranks", f"{ranks}")),
    ),
}
ORDER_OF = {"space": ("before", "now"), "tight": ("before", "now")}
"""Of parts that take longer; the other way round the next time."""


def results(part: str) -> Path:
    return (FOLDER.parent / "space" if part == "space" else FOLDER) / "before.json"


def ran(checkout: Path, part: str) -> dict[str, Any]:
    """What one run of a checkout measured."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    commit = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    with tempfile.TemporaryDirectory() as folder:
        out, load = Path(folder) / "out.json", os.getloadavg()[0]
        command = [sys.executable, "-m", "penstock", "bench", *PARTS[part], "--out", str(out), "--json"]
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=folder)
        said = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
        return {"part": part, "commit": said, "load": load, "result": json.loads(out.read_text())}


def measure(before: Path, part: str, most: int | None = None) -> None:
    """Runs the order of a part, or at most so many of its runs, and goes on where it was left."""
    known = json.loads(results(part).read_text()) if results(part).exists() else []
    order = ORDER_OF.get(part, ORDER)
    rounds, done = divmod(len([row for row in known if row["part"] == part]), len(order))
    if part in ORDER_OF and rounds % 2:
        order = order[::-1]
    for which in order[done:][:most]:
        known.append({"which": which, **ran(before if which == "before" else NOW, part)})
        results(part).write_text(json.dumps(known) + "\n")
        print(which, *(f"{name} {value:.4g}" for name, value in numbers(known[-1]).items()), flush=True)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """By name, what a run says in numbers: milliseconds, seconds or a gap in percent."""
    found: dict[str, float] = {}
    result = row["result"]
    if row["part"] == "speed":
        for size in result["speeds"]:
            name = f"{size['num_ranks']} x {size['num_microbatches']}"
            found |= {f"{name}: listed ms": size["list_ms"], f"{name}: timed ms": size["time_ms"]}
    elif row["part"] == "space":
        for search in result["searches"]:
            limit = "any" if search["memory_limit"] is None else f"{search['memory_limit']:g}"
            found[f"{search['num_ranks']} x {search['num_microbatches']}, memory {limit}: s"] = search["seconds"]
        found["all searches: s"] = sum(search["seconds"] for search in result["searches"])
    else:
        for size in result["families"]:
            name, each = f"{size['num_ranks']} x {size['num_microbatches']}", size["instances"]
            if row["part"] == "free":
                found[f"{name}: first ms"] = median(one["fast_ms"] for one in each)
            found |= {
                f"{name}: mean gap %": 100 * fmean(one["gap"] for one in each),
                f"{name}: mean s": fmean(one["seconds"] for one in each),
            }
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """By number, the median of the runs before and now."""
    lines = ["| | before | now | now over before | runs each |", "|---|---:|---:|---:|---:|"]
    for part in PARTS:
        by: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
        for row in rows:
            if row["part"] == part:
                by[row["which"]].append(numbers(row))
        for name in by["before"][0] if by["before"] and by["now"] else ():
            before, now = (median(run[name] for run in by[which]) for which in ("before", "now"))
            share = f"{now / before:.3f}" if before else "-"
            lines.append(f"| {part}, {name} | {before:.4g} | {now:.4g} | {share} | {len(by['now'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        for each in (results("speed"), results("space")):
            print(each.parent.name, table(json.loads(each.read_text())) if each.exists() else "", sep="\n")
    else:
        measure(Path(sys.argv[1]).resolve(), sys.argv[2], *map(int, sys.argv[3:]))
