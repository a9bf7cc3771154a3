"""Runs with known faults as tables in the form of ByteDance's study, timed by a plain loop of their own.

sample = study_sample(slow_worker=(1, 2, 2.0))
sample.write(path)                      parquet
sample.steps[0].no_delay                ms of the step, had nobody started late
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

Row = dict[str, Any]
F, B = 10.0, 20.0
"""Ms of a forward and a backward where nothing is special."""


@dataclass
class Sample:
    """A recorded run.

    Attributes:
        rows: of the table, times in seconds as the study has them.
        no_delay: ms of each step, had nobody started late.
        measured: ms of each step.
    """

    rows: list[Row]
    no_delay: dict[int, float] = field(default_factory=dict)
    measured: dict[int, float] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        import pyarrow
        import pyarrow.parquet

        names = list(self.rows[0])
        pyarrow.parquet.write_table(pyarrow.table({n: [row[n] for row in self.rows] for n in names}), path)
        return path


def study_sample(
    *,
    seed: int = 0,
    num_steps: int = 4,
    num_replicas: int = 3,
    num_ranks: int = 4,
    num_microbatches: int = 8,
    slow_worker: tuple[int, int, float] | None = None,
    slow_stage: tuple[int, float] | None = None,
    slow_link: tuple[int, int, int, float] | None = None,
    lengths: float = 0.0,
    noise: float = 0.002,
    message: float = 0.5,
    reduce: float = 5.0,
    launch: float = 0.0,
    skew: Mapping[int, float] | None = None,
) -> Sample:
    """A run of 1f1b.

    Args:
        slow_worker: replica, rank and how many times as long its ops take. slow_stage: likewise.
        slow_link: replica, source, target and ms of its messages.
        lengths: the standard deviation of the logarithm of microbatches' lengths; noise: of single ops.
        message, reduce: ms of a message, and of the reduction of gradients.
        launch: ms by which each rank's first op starts late.
        skew: ms by which the clock of a rank, in all replicas, is ahead.
    """
    rng = Random(seed)
    sample = Sample([])
    for step in range(10, 10 + num_steps):
        length = [
            [rng.lognormvariate(0, lengths) if lengths else 1.0 for _ in range(num_microbatches)]
            for _ in range(num_replicas)
        ]
        own = {
            (d, kind, s, m): base
            * length[d][m]
            * (slow_stage[1] if slow_stage and slow_stage[0] == s else 1.0)
            * (slow_worker[2] if slow_worker and slow_worker[:2] == (d, s) else 1.0)
            * rng.lognormvariate(0, noise)
            for d in range(num_replicas)
            for kind, base in (("F", F), ("B", B))
            for s in range(num_ranks)
            for m in range(num_microbatches)
        }

        def way(d: int, a: int, b: int) -> float:
            return slow_link[3] if slow_link and slow_link[:3] == (d, a, b) else message

        for late in (0.0, launch):
            rows = _step(step, num_replicas, num_ranks, num_microbatches, own, way, reduce, late)
            time = (max(r["start_ts"] + r["duration"] for r in rows) - min(r["start_ts"] for r in rows)) * 1e3
            (sample.measured if late == launch and late else sample.no_delay)[step] = time
            if late == launch:
                break
        sample.measured.setdefault(step, sample.no_delay[step])
        for row in rows:
            row["start_ts"] += step * 100.0 + (skew or {}).get(row["stage"], 0.0) / 1e3
        sample.rows += rows
    return sample


def order_1f1b(rank: int, num_ranks: int, num_microbatches: int) -> list[tuple[str, int]]:
    warmup = min(num_ranks - rank - 1, num_microbatches)
    row = [("F", m) for m in range(warmup)]
    for m in range(num_microbatches - warmup):
        row += [("F", m + warmup), ("B", m)]
    return row + [("B", m) for m in range(num_microbatches - warmup, num_microbatches)]


def _step(
    step: int, replicas: int, ranks: int, num: int, own: Any, way: Any, reduce: float, late: float
) -> list[Row]:
    rows: list[Row] = []
    ended: dict[tuple[int, str, int, int], float] = {}
    came: dict[tuple[int, int], float] = {}

    def add(
        d: int, r: int, op: str, start: float, end: float, seq: int, microbatch: int = -1, chunk: int = -1
    ) -> None:
        gmc = r if op.endswith("compute") else -1
        rows.append(
            {"dp_rank": d, "stage": r, "rank": r * replicas + d, "step": step, "optype": op, "start_ts": start / 1e3,
             "duration": (end - start) / 1e3, "seq_id": seq, "mc": chunk, "mb_id": microbatch, "gmc": gmc}
        )  # fmt: skip

    for d in range(replicas):
        for r in range(ranks):
            add(d, r, "params-all-gather", 0.0, 2.0, 0, chunk=0)
        todo = {r: order_1f1b(r, ranks, num) for r in range(ranks)}
        free = dict.fromkeys(range(ranks), 2.0 + late)
        link: dict[tuple[int, int], float] = {}
        posted = {(r, kind): 0.0 for r in range(ranks) for kind in "FB"}
        while any(todo.values()):
            for r in range(ranks):
                while todo[r]:
                    kind, m = todo[r][0]
                    source = r - 1 if kind == "F" else r + 1
                    start = free[r]
                    if 0 <= source < ranks:
                        sent = ended.get((d, kind, source, m))
                        if sent is None:
                            break
                        begin = max(sent, link.get((source, r), 0.0), posted[r, kind])
                        arrived = begin + way(d, source, r)
                        link[source, r] = arrived
                        name = "forward" if kind == "F" else "backward"
                        add(d, r, f"{name}-recv", posted[r, kind], arrived, m)
                        add(d, source, f"{name}-send", sent, arrived, m)
                        start = max(start, arrived)
                    end = start + own[d, kind, r, m]
                    add(d, r, "forward-compute" if kind == "F" else "backward-compute", start, end, m, m, 0)
                    ended[d, kind, r, m] = free[r] = end
                    posted[r, kind] = end
                    todo[r].pop(0)
        for r in range(ranks):
            came[d, r] = free[r]
    end = 0.0
    reduced = {r: max(came[d, r] for d in range(replicas)) + reduce for r in range(ranks)}
    for (d, r), start in came.items():
        add(d, r, "grads-reduce-scatter", start, reduced[r], 0, chunk=0)
        end = max(end, reduced[r])
    for d, r in came:
        add(d, r, "optimizer-clip-main-grad", reduced[r], end + 1.0, 0)
        add(d, r, "optimizer", end + 1.0, end + 4.0, 0)
    return rows
