"""How close emulated runs come to simulated ones: makespans over schedules, dispatch, ranks and link conditions.

    python benchmarks/emulated/run.py [--ranks 4,8,16] [--steps 2] [--stretch 1] [--processes] [--out FILE.json]

Ops of 10 ms. Ranks are threads of this process, or, with `--processes`, a process each that talk over gloo. The
makespan of each step is compared with the simulated one, and with the simulated one with the transport's own latency
on every link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.control.closed_loop_simulation import as_run
from penstock.cost.links import LinkQueues
from penstock.runtime.emulation.pipeline import Emulation
from penstock.runtime.launch import init_process, launch
from penstock.runtime.transport.choose import TransportChoice, TransportOptions

OP = 10.0
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
SIZE = 100_000
"""Bytes of a message."""


def conditions(num_ranks: int) -> dict[str, str]:
    """The links' conditions by a name: none, a late last link, and links of every kind. For 3 ranks or more."""
    last = f"{num_ranks - 2}:{num_ranks - 1}"
    return {
        "none": "",
        "late": f"{last}=latency:60ms",
        "mixed": f"0:1=latency:normal:30ms,10ms@50..100ms {last}=occupancy:6ms+loss:1%",
    }


def cases(ranks: Sequence[int], schedules: Sequence[str]) -> Iterator[dict[str, Any]]:
    for num_ranks in ranks:
        for schedule in schedules:
            for links in conditions(num_ranks):
                for dispatch in ("frozen", "dynamic"):
                    yield {"num_ranks": num_ranks, "schedule": schedule, "links": links, "dispatch": dispatch}


def measure(case: dict[str, Any], steps: int, stretch: float) -> dict[str, Any]:
    """Emulates one case; between processes every rank calls it."""
    num_ranks = case["num_ranks"]
    schedule = ps.build(case["schedule"], num_ranks, 2 * num_ranks)
    row = [OP * num_ranks / schedule.num_stages] * schedule.num_stages
    costs = ps.Costs(row, row, row, message_bytes=[SIZE] * schedule.num_stages)
    links = ps.Links.parse(conditions(num_ranks)[case["links"]])
    wall, cpu = time.perf_counter(), time.process_time()
    run = ps.emulate(schedule, costs, links=links, dispatch=case["dispatch"], num_steps=steps, stretch=stretch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        **case,
        "errors": list(run.errors),
        "calibrated_errors": calibrated_errors(run, schedule, costs),
        "own_latency": run.own_latency,
        "cores_used_by_this_process": cpu / wall,
    }


def calibrated_errors(run: Emulation, schedule: ps.Schedule, costs: ps.Costs) -> list[float]:
    """The errors of the steps against simulations in which every message also takes the transport's own latency."""
    lines = LinkQueues(replace(run.conditions, base=run.own_latency))
    carried = TransportChoice(TransportOptions(links=run.conditions)).simulated
    found = []
    for timeline, configuration, start in zip(run.timelines, run.configurations, run.starts, strict=True):
        simulated = ps.simulate(schedule, costs, **as_run(carried, configuration, lines, start))
        found.append(timeline.makespan / simulated.makespan - 1)
    return found


def run(
    ranks: Sequence[int], schedules: Sequence[str] = SCHEDULES, steps: int = 2, stretch: float = 1.0
) -> list[dict[str, Any]]:
    """All cases with ranks as threads."""
    return [measure(case, steps, stretch) for case in cases(ranks, schedules)]


def run_processes(
    ranks: Sequence[int], schedules: Sequence[str] = SCHEDULES, steps: int = 2, stretch: float = 1.0
) -> list[dict[str, Any]]:
    """All cases with a process per rank; one launch for each number of ranks."""
    rows: list[dict[str, Any]] = []
    for num_ranks in ranks:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
            program = [__file__, "--ranks", str(num_ranks)]
            program += ["--steps", str(steps), "--stretch", str(stretch), "--schedules", ",".join(schedules)]
            code = launch([*program, "--rows", f"{name}/rows.json"], num_ranks)
            if code != 0:
                raise SystemExit(code)
            rows += json.loads(Path(name, "rows.json").read_text())
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far steps are off: of all, by ranks and dispatch, and by ranks, dispatch and links.

    `median` and `worst` compare with the simulated makespan, the calibrated ones with that in which every link has
    the transport's own latency too.
    """
    groups: dict[str, list[dict[str, Any]]] = {"all": list(rows)}
    for keys in (("num_ranks", "dispatch"), ("num_ranks", "dispatch", "links")):
        for row in rows:
            groups.setdefault(" ".join(str(row[key]) for key in keys), []).append(row)
    return {name: _errors(found) for name, found in groups.items()}


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own, calibrated = ([abs(error) for row in rows for error in row[n]] for n in ("errors", "calibrated_errors"))
    return {
        "steps": len(own),
        "median": statistics.median(own),
        "worst": max(own),
        "calibrated_median": statistics.median(calibrated),
        "calibrated_worst": max(calibrated),
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Median and worst error of every group, as Markdown."""
    lines = [
        "| ranks, dispatch, links | steps | median error | worst | with the transport's latency | worst |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, errors in found.items():
        num_steps, *shares = errors.values()
        lines.append(f"| {name} | {num_steps} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8,16")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stretch", type=float, default=1.0)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--rows", type=Path, help="write every case there; for the ranks of --processes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ranks, schedules = [int(part) for part in given.ranks.split(",")], given.schedules.split(",")
    rank = init_process(60.0)[0] if "RANK" in os.environ else 0
    rows = (run_processes if given.processes else run)(ranks, schedules, given.steps, given.stretch)
    if rank == 0 and given.rows is not None:
        given.rows.write_text(json.dumps(rows))
    if "RANK" not in os.environ:
        found = summary(rows)
        print(table(found))
        if given.out is not None:
            ranks_are = "processes" if given.processes else "threads"
            save_summary(given.out, {**record(), "ranks_are": ranks_are, "stretch": given.stretch, "errors": found})


if __name__ == "__main__":
    main()
