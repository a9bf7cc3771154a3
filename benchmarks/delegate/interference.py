"""What a step costs whose links may be delegated, and one whose links are. On a CPU; no link is late.

    python benchmarks/delegate/interference.py --out benchmarks/delegate/interference.json

Four processes of one host train the GPT of benchmarks/runtime. Six ways take turns in the same processes, a block of
steps each, in the other order in every second block:

    shared memory     transport "host" whose links can't be delegated
    again             a second pipeline of the same kind: how far two measurements of one thing differ
    none, not begun   the same, and links may be delegated; no delegate has started yet
    none              the same once delegates have started: they wait
    one, all          one link, or all three, go by delegates; the others through shared memory
    gloo              transport "gloo"

The first three run by themselves first. A ratio is the median over the blocks of a way's time
by that of "shared memory" in the same block.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import penstock as ps
from benchmarks.runtime.rank import DEADLINE, WARM_UPS, measure
from benchmarks.runtime.sides import SIZES, SideTask
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.models import CrossEntropy

NUM_RANKS, NUM_MICROBATCHES = 4, 8
STEPS = {"tiny": 10, "small": 2}
"""Steps a block."""
PLAIN, AGAIN, UNBEGUN = "shared memory", "again", "none, not begun"
DELEGATED: dict[str, tuple[tuple[int, int], ...]] = {
    UNBEGUN: (),
    "none": (),
    "one": ((1, 2),),
    "all": tuple((rank, rank + 1) for rank in range(NUM_RANKS - 1)),
}


@dataclass
class Way:
    """A way for messages to travel, as `measure` takes it."""

    pipe: ps.Pipeline
    task: SideTask
    delegated: tuple[tuple[int, int], ...] | None = None

    def begin(self) -> None:
        """Sets which links are delegated."""
        if self.delegated is not None and self.delegated != self.pipe.configuration.delegated:
            self.pipe.reconfigure(replace(self.pipe.configuration, delegated=self.delegated))
        for _ in range(WARM_UPS):
            self.run()
            self.clear()

    def run(self) -> torch.Tensor | None:
        return self.pipe.step(self.task.inputs, self.task.targets, update=False).loss

    def clear(self) -> None:
        self.pipe.zero_grad()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.pipe.parameters() if parameter.grad is not None]


def work(rank: int, size: str, num_blocks: int) -> dict[str, list[dict[str, Any]]]:
    """Every block's times on one rank: of the two ways before delegates start, then of all."""
    schedule = ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    task = SideTask.of(SIZES[size], schedule, rank)

    def pipeline(transport: ps.TransportOptions) -> ps.Pipeline:
        stages = [partial(task.build, stage) for stage in range(schedule.num_stages)]
        return ps.Pipeline(
            stages, schedule, loss_fn=CrossEntropy(), mesh=dist.new_group(), transport=transport, timeout=DEADLINE
        )

    routed = pipeline(ps.TransportOptions(delegates=ps.runtime.DelegateOptions()))
    ways = {name: Way(pipeline(ps.TransportOptions()), task) for name in (PLAIN, AGAIN)}
    ways |= {name: Way(routed, task, delegated) for name, delegated in DELEGATED.items()}
    ways["gloo"] = Way(pipeline(ps.TransportOptions("gloo")), task)
    first = [PLAIN, AGAIN, UNBEGUN]
    return {
        "first": blocks({name: ways[name] for name in first}, num_blocks, STEPS[size]),
        "all": blocks({name: way for name, way in ways.items() if name != UNBEGUN}, num_blocks, STEPS[size]),
    }


def blocks(ways: dict[str, Way], num_blocks: int, steps: int) -> list[dict[str, Any]]:
    """The times of all ways, block by block."""
    found = []
    for number in range(num_blocks):
        names = list(ways) if number % 2 == 0 else list(ways)[::-1]
        measured = {}
        for name in names:
            ways[name].begin()
            measured[name] = measure(ways[name], steps)
        found.append(measured)
    return found


def main_of_rank(rank: int, size: str, num_blocks: int, folder: Path) -> None:
    """A rank's process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=DEADLINE)
    )
    (folder / f"{rank}.json").write_text(json.dumps(work(rank, size, num_blocks)))
    dist.barrier()
    os._exit(0)


def rows_of(size: str, ranks: list[dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A row a way: the median step, and its ratio to shared memory's. Times are means over the ranks."""
    rows = []
    for phase in ("first", "all"):
        by_block = [
            {
                name: {metric: mean(each[name][metric] for each in block) for metric in block[0][name]}
                for name in block[0]
            }
            for block in zip(*(rank[phase] for rank in ranks), strict=True)
        ]
        for name in by_block[0]:
            row: dict[str, Any] = {"size": size, "phase": phase, "way": name, "num_blocks": len(by_block)}
            for metric in ("wall_ms", "process_cpu_ms"):
                row[metric] = round(median(block[name][metric] for block in by_block), 2)
                ratios = [block[name][metric] / block[PLAIN][metric] for block in by_block]
                row[f"{metric}_ratio"] = round(median(ratios), 3)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun, rows = record(), []
    for size in args.gpt:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            torch.multiprocessing.spawn(main_of_rank, (size, args.blocks, Path(folder)), NUM_RANKS)
            ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
        rows += rows_of(size, ranks)
    for row in rows:
        print(
            f"{row['size']:6} {row['phase']:6} {row['way']:16} {row['wall_ms']:8.2f} ms {row['wall_ms_ratio']:6.3f}"
            f"   CPU {row['process_cpu_ms']:8.2f} ms {row['process_cpu_ms_ratio']:6.3f}"
        )
    if args.out is not None:
        result = {"record": begun, "load_after": [round(each, 2) for each in os.getloadavg()], "rows": rows}
        save_summary(args.out, result)


if __name__ == "__main__":
    main()
