"""How long `ps.plan` takes beside the limit it was given, in processes of their own.

    python benchmarks/limits/run.py 8x32                   measures one size, and rewrites its part of results.json
    python benchmarks/limits/run.py --table                prints the table of README.md from results.json

The problem is `penstock bench plan`'s under a tight cap: uneven stages, one slow link, as many activations in flight
on a rank as there are ranks. *Warm*: numba's machine code is on disk, as `make install` leaves it, and the process
loads it. *Cold*: NUMBA_CACHE_DIR is an empty folder, as after an installation without that. Each number is the first
plan of its process, from the call to its return.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SIZES = ((8, 32), (32, 256), (128, 1024))
LIMITS = (2.0, 10.0)
CACHES = ("warm", "cold")
REPEATS = 3
SEED = 7

ONE = """
import json, sys, time
import numpy as np
import penstock as ps
from penstock.bench.plan import draw
num_ranks, num_microbatches, limit, seed = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
costs, links = draw(num_ranks, np.random.default_rng([seed, num_ranks]))
before = time.perf_counter()
p = ps.plan(costs, num_ranks, num_microbatches, links, max_in_flight=num_ranks, time_limit=limit)
elapsed = time.perf_counter() - before
from penstock.planning.compile_ahead import wait_for_children
wait_for_children()
print(json.dumps({"elapsed": elapsed, "gap": p.gap, "how": p.how}))
"""


def measured(num_ranks: int, num_microbatches: int, limit: float, cache: str) -> dict[str, Any]:
    """Seconds and gap of the first plan of a process."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **({"NUMBA_CACHE_DIR": empty} if cache == "cold" else {})}
        command = [sys.executable, "-c", ONE, str(num_ranks), str(num_microbatches), str(limit), str(SEED)]
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(said)
    return found


def rows(num_ranks: int, num_microbatches: int) -> list[dict[str, Any]]:
    """Every limit and cache of one size."""
    subprocess.run([sys.executable, "-m", "penstock.planning.compile_ahead"], check=True, capture_output=True)
    found = []
    for cache in CACHES:
        for limit in LIMITS:
            runs = [measured(num_ranks, num_microbatches, limit, cache) for _ in range(REPEATS)]
            found.append(
                {
                    "num_ranks": num_ranks,
                    "num_microbatches": num_microbatches,
                    "cache": cache,
                    "time_limit": limit,
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


def main() -> None:
    path = FOLDER / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    if sys.argv[1:] == ["--table"]:
        print(table(results))
        return
    sizes = {f"{ranks}x{num}": (ranks, num) for ranks, num in SIZES}
    size = sizes[sys.argv[1]]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    kept = [row for row in results["rows"] if (row["num_ranks"], row["num_microbatches"]) != size]
    new = [{**row, "commit": commit} for row in rows(*size)]
    results = {
        "command": "python benchmarks/limits/run.py SIZE",
        "num_processors": os.cpu_count(),
        "rows": sorted([*kept, *new], key=lambda row: (row["num_ranks"], row["cache"] == "cold", row["time_limit"])),
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
