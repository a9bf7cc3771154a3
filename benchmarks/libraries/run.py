"""What torch elastic's processes take beside ours.

    python benchmarks/libraries/run.py --out benchmarks/libraries/results.json

processes   seconds until four ranks have imported penstock.runtime: a script by elastic's agent for scripts (each an
            interpreter of its own), a function by elastic from a fork server, a script by `penstock.runtime.launch`
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from experiments.common.readme import write_between
from experiments.common.record import record
from penstock.runtime.launch import launch

RANKS = 4
RUNS = 5
PROGRAM = "import penstock.runtime\n"
README = Path(__file__).with_name("README.md")


def imports() -> None:
    import penstock.runtime  # noqa: F401


def by_elastic(entry: Any, args: dict[int, tuple[str, ...]], method: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        environment = {rank: dict(os.environ) for rank in range(RANKS)}
        logs = DefaultLogsSpecs(log_dir=folder)
        running = start_processes("bench", entry, args, environment, logs, start_method=method)
        running.wait()
        return time.perf_counter() - start


def by_launch(script: str) -> float:
    start = time.perf_counter()
    assert launch([script], RANKS) == 0
    return time.perf_counter() - start


def processes() -> dict[str, list[float]]:
    multiprocessing.set_forkserver_preload(["penstock.runtime"])
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(PROGRAM)
        script.flush()
        rounds: dict[str, Callable[[], float]] = {
            "elastic, script": lambda: by_elastic(
                sys.executable, dict.fromkeys(range(RANKS), (script.name,)), "spawn"
            ),
            "elastic, function, fork server": lambda: by_elastic(
                imports, dict.fromkeys(range(RANKS), ()), "forkserver"
            ),
            "penstock.runtime.launch, script": lambda: by_launch(script.name),
        }
        return {name: [round(each(), 2) for _ in range(RUNS)] for name, each in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    given = parser.parse_args()
    result = {**record(), "processes, s": processes()}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        tell(result)


def tell(result: dict[str, Any]) -> None:
    """Writes the results into the page."""
    lines = ["| what | each run | median |", "|---|---|---:|"]
    for name, runs in result["processes, s"].items():
        lines.append(f"| {RANKS} ranks have imported `penstock.runtime`: {name} | {runs} s | {median(runs):.1f} s |")
    write_between(README, "results", lines)


if __name__ == "__main__":
    main()
