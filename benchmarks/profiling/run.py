"""What measuring costs: steps with links, ops and reports watched (`ps.AdaptOptions`), beside the same steps without.

    python benchmarks/profiling/run.py [--ranks 4] [--steps 8] [--blocks 6] [--out FILE.json]

Emulated ranks, a process each over gloo, 4 microbatches per rank, ops of 10 ms, messages of 1 MB. Ops take no
processor, so what a rank's process takes is all overhead: the cost is the difference of the two, as a share of the
iteration. Blocks of steps of both kinds alternate in the same processes. Nothing is slow and no remedy is allowed:
what is paid for is stamping messages, threads that wait for them, reports by the store, and on rank 0 the controller.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

import penstock as ps
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.runtime.launch import init_process, launch

OP = 10.0
SIZE = 1_000_000
SIDES = ("plain", "steered")
WARM_UPS = 8
"""Steps of each kind that are not counted: the controller has costs after five."""


def run(num_ranks: int, steps: int, blocks: int) -> list[dict[str, Any]]:
    """Measures; one process per rank calls it. Returns every rank's row, on every rank."""
    schedule = ps.build("1f1b", num_ranks, 4 * num_ranks)
    row = [OP] * num_ranks
    costs = ps.Costs(row, row, row, message_bytes=[SIZE] * num_ranks)
    steering = ps.AdaptOptions(dispatches=("frozen",), may_replan=False, may_delegate=False)
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    with (
        ps.runtime.EmulatedPipeline(schedule, costs) as plain,
        ps.runtime.EmulatedPipeline(schedule, costs, adapt=steering) as ours,
    ):
        pipes = {"plain": plain, "steered": ours}
        for pipe in pipes.values():
            for _ in range(WARM_UPS):
                pipe.step()
        for block in range(blocks):
            for side in SIDES if block % 2 == 0 else SIDES[::-1]:
                wall, cpu = time.perf_counter(), _cpu()
                makespans = [pipes[side].step().timeline.makespan for _ in range(steps)]
                wall, cpu = time.perf_counter() - wall, _cpu() - cpu
                found[side].append((cpu / steps * 1e3, statistics.median(makespans)))
    return [
        dict(zip(("rank", "cpu_ms", "makespan_ms"), record, strict=True))
        for record in _gather(
            (
                dist.get_rank(),
                {side: [cpu for cpu, _ in pairs] for side, pairs in found.items()},
                {side: [ms for _, ms in pairs] for side, pairs in found.items()},
            )
        )
    ]


def _cpu() -> float:
    """Seconds of processor that this process took, and its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By rank: processor time a step of both kinds, the difference as a share of the iteration."""
    lines = [
        "| rank | processor a step, plain | steered | more, of the iteration | iteration, plain | steered |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cpu = {side: statistics.median(row["cpu_ms"][side]) for side in SIDES}
        ms = {side: statistics.median(row["makespan_ms"][side]) for side in SIDES}
        more = (cpu["steered"] - cpu["plain"]) / ms["plain"]
        lines.append(
            f"| {row['rank']} | {cpu['plain']:.1f} ms | {cpu['steered']:.1f} ms | {more:.2%} | "
            f"{ms['plain']:.1f} ms | {ms['steered']:.1f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank, _ = init_process(60.0)
        rows = run(given.ranks, given.steps, given.blocks)
        if rank == 0:
            given.out.write_text(json.dumps(rows))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        code = launch([*sys.argv, "--out", f"{name}/rows.json"], given.ranks)
        if code != 0:
            raise SystemExit(code)
        rows = json.loads(Path(name, "rows.json").read_text())
    if given.out is not None:
        save_summary(given.out, {**record(), "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
