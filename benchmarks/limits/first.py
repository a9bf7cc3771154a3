"""Is the first plan of a fresh installation as good as the tenth, and does it keep its limit?

    python benchmarks/limits/first.py                     three installations, ten plans each: a quarter of an hour
    python benchmarks/limits/first.py --problem 8x32      one of the three
    python benchmarks/limits/first.py --readme            writes the table of README.md from first.json

For each problem a new virtual environment gets the checkout by `pip install`, and no cache folder is there. Then ten
processes plan the problem with a limit of two seconds and ten with one of ten, in turn; the first is the first use of
this installation. Times are from the call of `ps.plan` to its return.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROBLEMS = ("8x32", "V 8x16", "128x1024")
LIMITS = (2.0, 10.0)
CALLS = 10
MOST_WORSE, MOST_LATE = 0.003, 1.05
"""How much larger the first gap may be than the tenth, and how many times its limit a plan may take."""

ONE = """
import json, sys, time
import numpy as np
import penstock as ps
from penstock.schedule import v_shape

def uneven(num_stages, random, num_ranks):
    f, i, w = (random.uniform(*each, num_stages).tolist() for each in ((90, 110), (90, 130), (70, 110)))
    rank = int(random.integers(num_ranks - 1))
    return ps.Costs(f, i, w), ps.Links({(rank, rank + 1): float(random.uniform(100, 300))})

name, limit = sys.argv[1], float(sys.argv[2])
num_ranks, num_microbatches, cap, placement = {
    "8x32": (8, 32, 6, None), "V 8x16": (8, 16, 12, v_shape(8)), "128x1024": (128, 1024, 120, None)
}[name]
num_stages = num_ranks if placement is None else placement.num_stages
costs, links = uneven(num_stages, np.random.default_rng([7, num_ranks, num_stages]), num_ranks)
given = {} if placement is None else {"placement": placement}
before = time.perf_counter()
p = ps.plan(costs, num_ranks, num_microbatches, links, max_in_flight=cap, time_limit=limit, **given)
print(json.dumps({"seconds": time.perf_counter() - before, "gap": p.gap}))
"""


def installed(folder: Path) -> tuple[Path, float]:
    """A new environment with the checkout in it, and the seconds that `pip install` took."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    words = [str(python), "-m", "pip", "install", "-q", f"{ROOT}[exact]", "-c", str(ROOT / "constraints.txt")]
    began = time.perf_counter()
    subprocess.run(words, check=True)
    return python, time.perf_counter() - began


def measured(problem: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        python, install_seconds = installed(Path(folder))
        environment = {**os.environ, "XDG_CACHE_HOME": folder, "HOME": folder}
        environment.pop("PYTHONPATH", None)
        calls: dict[float, list[dict[str, float]]] = {limit: [] for limit in LIMITS}
        for _ in range(CALLS):
            for limit in LIMITS:
                words = [str(python), "-c", ONE, problem, str(limit)]
                said = subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True)
                calls[limit].append(json.loads(said.stdout))
    return [
        {
            "problem": problem,
            "time_limit": limit,
            "install_seconds": round(install_seconds, 1),
            "gaps": [call["gap"] for call in found],
            "seconds": [call["seconds"] for call in found],
        }
        for limit, found in calls.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| problem | limit s | first gap | tenth | median of ten | longest / limit |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gaps, longest = row["gaps"], max(row["seconds"]) / row["time_limit"]
        first = f"{gaps[0]:.2%}{' **worse**' if gaps[0] > gaps[-1] + MOST_WORSE else ''}"
        late = f"{longest:.3f}{' **late**' if longest > MOST_LATE else ''}"
        middle = statistics.median(gaps)
        lines.append(
            f"| {row['problem']} | {row['time_limit']:g} | {first} | {gaps[-1]:.2%} | {middle:.2%} | {late} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    parser.add_argument("--readme", action="store_true")
    given = parser.parse_args()
    path = HERE / "first.json"
    if given.readme:
        write_between(HERE / "README.md", "first", table(json.loads(path.read_text())["rows"]))
        return
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for problem in given.problem or PROBLEMS:
        rows = [row for row in rows if row["problem"] != problem] + measured(problem)
        rows.sort(key=lambda row: (PROBLEMS.index(row["problem"]), row["time_limit"]))
        save_summary(path, {**record(), "command": "python benchmarks/limits/first.py", "rows": rows})
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
