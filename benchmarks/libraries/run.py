"""What torch elastic's processes and safetensors' slices take beside ours.

    python benchmarks/libraries/run.py --out benchmarks/libraries/results.json

processes   seconds until four ranks have imported penstock.runtime: a script by elastic's agent for scripts (each an
            interpreter of its own), a function by elastic from a fork server, a script by `penstock.runtime.launch`
slices      milliseconds to take half of a matrix of 64 MiB out of a safetensors file: the slice alone, and the whole,
            checked by its checksum, of which the half is kept
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

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from experiments.common.readme import write_between
from experiments.common.record import record
from penstock.runtime.checkpoint.format import checksum
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


def slices() -> dict[str, float]:
    found: dict[str, list[float]] = {"slice": [], "whole, checked": [], "the check alone": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.safetensors"
        save_file({"w": torch.randn(4096, 4096)}, path)
        for _ in range(7):
            with safe_open(path, framework="pt") as file:
                start = time.perf_counter()
                file.get_slice("w")[:2048].clone()
                found["slice"].append(time.perf_counter() - start)
            with safe_open(path, framework="pt") as file:
                start = time.perf_counter()
                whole = file.get_tensor("w").clone()
                middle = time.perf_counter()
                checksum(whole)
                found["the check alone"].append(time.perf_counter() - middle)
                whole[:2048].clone()
                found["whole, checked"].append(time.perf_counter() - start)
    return {name: round(median(each) * 1e3, 1) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    given = parser.parse_args()
    result = {**record(), "slices, ms": slices(), "processes, s": processes()}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        tell(result)


def tell(result: dict[str, Any]) -> None:
    """Writes the results into the page."""
    lines = ["| what | each run | median |", "|---|---|---:|"]
    for name, runs in result["processes, s"].items():
        lines.append(f"| {RANKS} ranks have imported `penstock.runtime`: {name} | {runs} s | {median(runs):.1f} s |")
    lines += [f"| half of 64 MiB: {name} |  | {each:.0f} ms |" for name, each in result["slices, ms"].items()]
    write_between(README, "results", lines)


if __name__ == "__main__":
    main()
