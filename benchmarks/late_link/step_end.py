"""What the end of a step costs where one link is late: the sums of all ranks, by a ring and from each to each.

    python benchmarks/late_link/step_end.py --out benchmarks/late_link/step_end.json
    python benchmarks/late_link/step_end.py --readme      writes the README's table

The README says what is measured.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.lab import Lab

FOLDER = Path(__file__).resolve().parent
RANKS, LATE = (2, 4, 8), (0, 20, 60)
"""Hosts, with a rank on each; and by how many ms the link of the first two is late, each way."""
BLOCKS, SUMS, STEPS = 5, 6, 4
"""Rounds in which all ways take turns; sums, and steps, of a way in each."""
VALUES = 40
PORT = 29512
TORCH, RING, DIRECT = "torch's all_reduce", "a ring", "each to each"


def rank_main(rank: int, num_ranks: int, out: str) -> int:
    """One rank: measures, and writes what it took where it is the first."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import penstock as ps
    from penstock.runtime.mesh import collective
    from penstock.runtime.mesh.peers import GroupPeers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://host0:{PORT}", rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    peers = GroupPeers(group, timeout=120.0)
    few = collective.FEW_BYTES
    values = torch.ones(VALUES, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_ranks)))
    pipe = ps.Pipeline(
        model,
        ps.build("zb", num_ranks, 4 * num_ranks),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        dispatch="hinted",
        precision=ps.PrecisionOptions(clip_norm=1.0),
        transport="gloo",
    )
    batch = torch.randn(4 * num_ranks, 16), torch.randn(4 * num_ranks, 16)

    def by(few_bytes: int, function: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            collective.FEW_BYTES = few_bytes
            return function()

        return run

    sums: dict[str, Callable[[], object]] = {
        TORCH: lambda: dist.all_reduce(values.clone()),
        RING: by(0, lambda: peers.sum(values)),
        DIRECT: by(few, lambda: peers.sum(values)),
    }
    steps = {RING: by(0, lambda: pipe.step(*batch)), DIRECT: by(few, lambda: pipe.step(*batch))}
    found: dict[str, dict[str, list[list[float]]]] = {}
    for what, ways, count in (("sum", sums, SUMS), ("step", steps, STEPS)):
        found[what] = {way: [] for way in ways}
        for block in range(BLOCKS + 1):
            for way, run in ways.items() if block % 2 else reversed(ways.items()):
                dist.barrier()
                took = []
                for _ in range(count):
                    began = time.perf_counter()
                    run()
                    took.append(round((time.perf_counter() - began) * 1e3, 2))
                if block:  # the first is to warm up
                    found[what][way].append(took)
    pipe.close()
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def cell(num_ranks: int, late: int) -> dict[str, Any]:
    """What it takes over a lab of so many hosts."""
    links = (f"0:1=latency:{late}ms",) if late else ()
    with tempfile.TemporaryDirectory() as folder, Lab(num_ranks, 1, links) as lab:
        out = Path(folder) / "found.json"
        ranks = []
        for host in range(num_ranks):
            words = [
                sys.executable,
                str(Path(__file__).resolve()),
                "--rank",
                f"{host}/{num_ranks}",
                "--out",
                str(out),
            ]
            ranks.append(lab.start(host, words, {**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE))
        codes = [rank.wait(600) for rank in ranks]
        if any(codes):
            raise SystemExit(f"{num_ranks} ranks, {late} ms: ranks ended with {codes}")
        found = json.loads(out.read_text())
        middles = {part: {way: middle(blocks) for way, blocks in ways.items()} for part, ways in found.items()}
        return {"ranks": num_ranks, "late_ms": late, **middles}


def middle(blocks: Sequence[Sequence[float]]) -> float:
    return statistics.median(took for block in blocks for took in block)


def tables(cells: Sequence[dict[str, Any]]) -> str:
    """Medians in ms, and how often the time of the ring fits into that of what goes directly."""
    lines = [
        "| ranks | late by, ms each way | sum: torch's `all_reduce` | by our ring | from each to each "
        "| ring / direct | step: by rings | from each to each | ring / direct |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in cells:
        sums, steps = each["sum"], each["step"]
        lines.append(
            f"| {each['ranks']} | {each['late_ms']} | {sums[TORCH]:.1f} | {sums[RING]:.1f} | {sums[DIRECT]:.1f} | "
            f"**{sums[RING] / sums[DIRECT]:.1f}** | {steps[RING]:.0f} | {steps[DIRECT]:.0f} | "
            f"**{steps[RING] / steps[DIRECT]:.1f}** |"
        )
    return "\n".join(lines)


def fill_readme() -> None:
    cells = json.loads((FOLDER / "step_end.json").read_text())["cells"]
    write_between(FOLDER / "README.md", "step end", tables(cells))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true", help="write the README's table, and run nothing")
    given = parser.parse_args(argv)
    if given.rank:
        rank, num_ranks = map(int, given.rank.split("/"))
        return rank_main(rank, num_ranks, str(given.out))
    if given.readme:
        fill_readme()
        return 0
    known, cells = record(), []
    for num_ranks in RANKS:
        for late in LATE:
            cells.append(cell(num_ranks, late))
            print(tables(cells[-1:]).splitlines()[-1], flush=True)
    if given.out:
        save_summary(given.out, {**known, "cells": cells})
    return 0


if __name__ == "__main__":
    sys.exit(main())
