"""Profiles and links with known numbers, and ranks that answer without measuring, for tests of the tuner."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from penstock.formats.profile import KINDS, MessageCosts, Profile
from penstock.tune.job import Task, WorkerAnswer


def profile(num_layers: int = 4, seed: int = 0, **changes: Any) -> Profile:
    """A profile with whole numbers drawn by `seed`; the same layers cost the same for any microbatch size."""
    draws = random.Random(seed)

    def row(low: int, high: int) -> list[float]:
        return [float(draws.randint(low, high)) for _ in range(num_layers)]

    rows: dict[str, Any] = {
        "f": row(1, 9), "b": row(4, 18), "f_split": row(1, 9), "i": row(1, 9), "w": row(1, 9),
        "activation": row(10, 50), "held": row(1, 10), "output": row(1, 9), "weight": row(5, 50),
        "state": row(5, 50), "update": row(0, 2), "tensors": [0.0] * num_layers,
    }  # fmt: skip
    names = [f"layer {number}" for number in range(num_layers)]
    given = {"model": "drawn", "layers": names, "microbatch_size": 1, "num_parallel": 1, **rows, **changes}
    fixed: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    return Profile(**fixed)


def transfer(
    send: float = 0.0,
    receive: float = 0.0,
    delay: float = 0.0,
    reduce: float = 0.0,
    threads: float = 0.0,
    **rest: Any,
) -> MessageCosts:
    """Messages that cost the same whatever their size."""
    return MessageCosts((1.0,), (send,), (receive,), (delay,), (reduce,), (threads,), **rest)


def ranges(*counts: int) -> list[range]:
    """Consecutive layers, so many a stage."""
    found, start = [], 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return found


class Ranks:
    """Stands in for `run_job`: answers as ranks would, with numbers of its own, and counts what it was asked."""

    def __init__(self, interrupt_at: int | None = None, others: float = 0.0) -> None:
        self.tasks: list[Task] = []
        self._interrupt_at, self._others = interrupt_at, others

    def __call__(
        self,
        tasks: Sequence[Task],
        num_ranks: int,
        num_threads: int,
        say: Callable[[str], None] | None = None,
        keep: Callable[[int, WorkerAnswer], None] | None = None,
    ) -> list[WorkerAnswer]:
        answers = []
        for number, task in enumerate(tasks):
            if self._interrupt_at == len(self.tasks):
                raise KeyboardInterrupt
            if say is not None:
                say(task["text"])
            self.tasks.append(task)
            answers.append(
                WorkerAnswer([self._answer(task, rank, num_ranks) for rank in range(num_ranks)], self._others)
            )
            if keep is not None:
                keep(number, answers[-1])
        return answers

    def _answer(self, task: Task, rank: int, num_ranks: int) -> dict[str, Any]:
        if task["do"] == "transfer":
            if num_ranks == 1:
                return {"gap": 0.01, "step_alone": 0.5}
            rows = {name: [0.1, 0.2] for name in ("send", "receive", "delay", "reduce", "threads", "sums", "values")}
            return {"sizes": [1000, 100000], **rows, "gap": 0.01, "step": 1.0}
        if task["do"] == "run":
            clock = {"wall": 0.05, "own": 0.04, "machine": 0.04 * num_ranks + self._others * 0.05}
            steps = [50.0, 52.0, 51.0]
            return {
                "steps": steps,
                "clocks": [clock] * 3,
                "makespans": [40.0, 42.0, 41.0],
                "ops": None,
                "notices": [],
                "pipeline_rank": rank,
                "peak_bytes": 1000.0 * (rank + 1),
            }
        if task["part"] is not None:
            return self._of_part(task)
        from penstock.runtime import partition
        from penstock.train.settings import Settings
        from penstock.tune.tuned_model import tuned_model

        costs = tuned_model(Settings.from_mapping(task["settings"])).costs
        own: Sequence[int] = partition(costs, num_ranks)[rank]
        sharing, size = task["num_sharing"], task["microbatch_size"]
        if sharing > 1:
            own = [0, len(costs) - 1]
        times = {
            f"{layer} {kind}": (1.0 + 0.2 * size * (layer + 1)) / sharing
            for layer in own
            for kind in (*KINDS, "update")
        }
        times |= {f"-1 {kind}": 0.05 for kind in KINDS}
        sizes = {"weight": 1e6 / sharing, "activation": 1e5 * size, "held": 5e4 * size, "output": 1e4 * size}
        kept = {**sizes, "transient": 1e5 if task["recompute"] else 0.0, "state": 2e6, "tensors": 12.0}
        if task["recompute"]:
            kept["activation"] = 1e4 * size
        return {"layers": list(own), "times": times, "bytes": {str(layer): kept for layer in own}, "step": 0.1}

    def _of_part(self, task: Task) -> dict[str, Any]:
        """Of a tower, whose every layer takes as long as its number says for each sample, or the contrast."""
        from penstock.train.settings import Settings
        from penstock.tune.tuned_model import parts_of

        part, size = parts_of(Settings.from_mapping(task["settings"]))[task["part"]], task["microbatch_size"]
        own = range(part.num_layers)
        times = {f"{layer} {kind}": 0.3 + 0.1 * size * (layer + 1) for layer in own for kind in (*KINDS, "update")}
        times |= {f"-1 {kind}": 0.05 for kind in KINDS}
        kept = {"weight": 1e5, "activation": 1e4 * size, "held": 5e3 * size, "output": 1e3 * size, "state": 2e5}
        kept["tensors"] = 12.0
        kept["transient"] = 2e4 if task["recompute"] else 0.0
        if task["recompute"]:
            kept["activation"] = 1e3 * size
        return {"layers": [*own], "times": times, "bytes": {str(layer): kept for layer in own}, "step": 0.1}
