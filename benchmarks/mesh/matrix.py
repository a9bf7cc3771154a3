"""Every mesh of four and of eight processes, drawn again and again: how far each is from one process.

    python benchmarks/mesh/matrix.py --rounds 20 --out benchmarks/mesh/matrix.json
    python benchmarks/mesh/matrix.py --readme      writes the table of README.md from matrix.json

In each round a GPT, a BERT and a CLIP run over every split of the processes into pp x dp x tp, each under a schedule,
a batch and options that Hypothesis draws (tests/mesh_cases.py). All jobs of a size run in one start of the processes.
Exits with 1 where a job is further from one process than float32's rounding, or a pipeline alone has other bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from mesh_cases import MODELS, TOLERANCE, Found, Job, jobs, packed, run_jobs, wrong
from mesh_runs import splits
from processes import run_ranks

PARTS = ("loss", "gradient", "norm", "parameter", "evaluated")


def draw(num_processes: int, rounds: int, number: int) -> list[list[Job]]:
    """The jobs of each round."""
    drawn: list[list[Job]] = []

    @seed(number)
    @settings(max_examples=rounds, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*(jobs(model, split) for split in splits(num_processes) for model in MODELS)))
    def keep(made: tuple[Job, ...]) -> None:
        drawn.append(list(made))

    keep()
    return drawn


def run(num_processes: int, drawn: Sequence[Job], deadline: float) -> tuple[list[dict[str, Any]], list[str]]:
    """A row a job, and in words what is wrong."""
    outcomes = run_ranks(num_processes, run_jobs, packed(drawn), deadline=deadline)
    failed = [f"process {o.rank} ended with {o.code}: {o.text[-3000:]}" for o in outcomes if o.code != 0]
    if failed:
        return [], failed
    found: list[list[Found]] = [o.value for o in outcomes]
    rows = []
    for number, job in enumerate(drawn):
        mine = [process[number] for process in found]
        rows.append(
            {"job": repr(job), "model": job.model, "split": job.split, "equal": all(one.equal for one in mine)}
            | {part: max(getattr(one, part) for one in mine) for part in PARTS}
        )
    return rows, wrong(drawn, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds that one start may take")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--readme", action="store_true", help="only write the table of README.md")
    given = parser.parse_args()
    if given.readme:
        folder = Path(__file__).parent
        found = json.loads((folder / "matrix.json").read_text())["largest"]
        write_between(folder / "README.md", "matrix", largest(found))
        return
    torch.set_num_threads(1)
    sizes: dict[str, list[dict[str, Any]]] = {}
    problems: list[str] = []
    for num_processes in given.processes:
        rows: list[dict[str, Any]] = []
        for number, drawn in enumerate(draw(num_processes, given.rounds, given.seed), start=1):
            begin = time.monotonic()
            more, bad = run(num_processes, drawn, given.deadline)
            rows += more
            problems += bad
            seconds = time.monotonic() - begin
            print(f"{num_processes} processes, round {number}: {len(more)} jobs in {seconds:.0f} s", *bad, sep="\n  ")
        sizes[str(num_processes)] = rows
        table(rows)
    if given.out is not None:
        result = {**record(), "tolerance": TOLERANCE}
        save_summary(given.out, {**result, "problems": problems, "largest": summary(sizes)})
    sys.exit(bool(problems))


def mesh_of(split: Sequence[int]) -> str:
    """What a split of pp x dp x tp has beside its pipelines, in words."""
    _, dp, tp = split
    if tp == 1:
        return "pipelines alone" if dp == 1 else "replicas, no shards"
    return "shards, no replicas" if dp == 1 else "both"


def summary(sizes: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """By processes and kind of mesh: splits, jobs, jobs equal to the bit, and the largest difference of each part."""
    found = []
    for processes, rows in sizes.items():
        for mesh in ("pipelines alone", "replicas, no shards", "shards, no replicas", "both"):
            mine = [row for row in rows if mesh_of(row["split"]) == mesh]
            num_splits = len({tuple(row["split"]) for row in mine})
            row = {"processes": int(processes), "mesh": mesh, "splits": num_splits, "jobs": len(mine)}
            row["equal"] = sum(job["equal"] for job in mine)
            found.append(row | {part: max((job[part] for job in mine), default=0.0) for part in PARTS})
    return found


def largest(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of README.md: the largest differences by processes and kind of mesh."""
    body = []
    for row in found:
        cells = [f"{row[part]:.0e}" if row[part] else "0" for part in PARTS]
        body.append([*(str(row[name]) for name in ("processes", "mesh", "splits", "jobs")), *cells])
    head = ["processes", "mesh", "splits", "jobs", "loss", "gradient", "norm", "after an update", "evaluation"]
    return markdown(head, body)


def table(rows: Sequence[dict[str, Any]]) -> None:
    """The largest differences of each split and model, as Markdown."""
    print("| pp | dp | tp | model | jobs | loss | gradient | norm | after an update | evaluation | same bits |")
    print("|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for split in sorted({tuple(row["split"]) for row in rows}):
        for model in MODELS:
            mine = [row for row in rows if tuple(row["split"]) == split and row["model"] == model]
            largest = [max(row[part] for row in mine) for part in PARTS]
            cells = [*map(str, split), model, str(len(mine)), *(f"{each:.0e}" if each else "0" for each in largest)]
            print("|", " | ".join([*cells, str(sum(row["equal"] for row in mine))]), "|")


if __name__ == "__main__":
    main()
