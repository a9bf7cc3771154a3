"""How long `ps.plan` takes beside the limit it was given, in processes of their own.

    python benchmarks/limits/run.py 8x32 warm              measures one size and cache, its part of results.json
    python benchmarks/limits/run.py 128x1024 cold --limit 10           the same for one limit
    python benchmarks/limits/run.py --readme               writes the table of README.md from results.json

The problem is that of `benchmarks/plan/run.py` under a tight cap: uneven stages, one slow link, as many activations
in flight on a rank as there are ranks. *Warm*: the library of the engine's functions is on disk, as an installation
leaves it, and the process loads it. *Cold*: in a checkout with an empty XDG_CACHE_HOME, where the process builds it.
Each number is the first plan of its process, from the call to its return.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.engine.compiled import is_compiled

FOLDER = Path(__file__).parent
SIZES = ((8, 32), (32, 256), (128, 1024))
LIMITS = (2.0, 10.0)
CACHES = ("warm", "cold")
REPEATS = {"warm": 3, "cold": 1}
SEED = 7

ONE = """
import json, sys, time
import numpy as np
import penstock as ps
from benchmarks.plan.run import draw
num_ranks, num_microbatches, limit, seed = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
costs, links = draw(num_ranks, np.random.default_rng([seed, num_ranks]))
before = time.perf_counter()
p = ps.plan(costs, num_ranks, num_microbatches, links, max_in_flight=num_ranks, time_limit=limit)
elapsed = time.perf_counter() - before
print(json.dumps({"elapsed": elapsed, "gap": p.gap, "how": p.how}))
"""


def measured(num_ranks: int, num_microbatches: int, limit: float, cache: str) -> dict[str, Any]:
    """Seconds and gap of the first plan of a process."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **({"XDG_CACHE_HOME": empty} if cache == "cold" else {})}
        command = [sys.executable, "-c", ONE, str(num_ranks), str(num_microbatches), str(limit), str(SEED)]
        said = subprocess.run(
            command, env=environment, cwd=FOLDER.parents[1], check=True, capture_output=True, text=True
        ).stdout
    found: dict[str, Any] = json.loads(said)
    return found


def rows(num_ranks: int, num_microbatches: int, cache: str, limits: Sequence[float]) -> list[dict[str, Any]]:
    """Limits of one size and cache."""
    if cache == "warm":
        is_compiled()
    found = []
    for limit in limits:
        runs = [measured(num_ranks, num_microbatches, limit, cache) for _ in range(REPEATS[cache])]
        found.append(
            {
                "num_ranks": num_ranks,
                "num_microbatches": num_microbatches,
                "cache": cache,
                "time_limit": limit,
                "load": os.getloadavg()[0],
                **{name: [run[name] for run in runs] for name in runs[0]},
            }
        )
    return found


def table(results: dict[str, Any]) -> str:
    lines = [
        "| ranks | microbatches | machine code | limit s | elapsed s | gap |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for row in results["rows"]:
        elapsed, gaps = sorted(row["elapsed"]), sorted(row["gap"])
        lines.append(
            f"| {row['num_ranks']} | {row['num_microbatches']} | {row['cache']} | {row['time_limit']:g} | "
            f"{elapsed[0]:.2f} to {elapsed[-1]:.2f} | {gaps[0]:.2%} to {gaps[-1]:.2%} |"
        )
    return "\n".join(lines)


def name_of(row: dict[str, Any]) -> tuple[int, int, str, float]:
    return row["num_ranks"], row["num_microbatches"], row["cache"], row["time_limit"]


def main() -> None:
    path = FOLDER / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    sizes = {f"{ranks}x{num}": (ranks, num) for ranks, num in SIZES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=sizes)
    parser.add_argument("cache", nargs="?", choices=CACHES)
    parser.add_argument("--limit", type=float, choices=LIMITS)
    parser.add_argument("--readme", action="store_true")
    asked = parser.parse_args()
    if asked.size and asked.cache:
        here = record()
        made = rows(*sizes[asked.size], asked.cache, [asked.limit] if asked.limit else LIMITS)
        new = {name_of(row): {**row, "commit": here["commit"]} for row in made}
        kept = {name_of(row): row for row in results["rows"]}
        results = {
            "command": "python benchmarks/limits/run.py SIZE CACHE",
            "machine": here["machine"],
            "rows": [
                row for _, row in sorted((kept | new).items(), key=lambda item: (item[0][:2], item[0][2:][::-1]))
            ],
        }
        save_summary(path, results)
    if asked.readme:
        write_between(FOLDER / "README.md", "results", table(results))


if __name__ == "__main__":
    main()
