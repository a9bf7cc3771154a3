"""The result of a comparison: a row per schedule, each compared with the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.train.compare.simulated import AS_PLANNED, SimulatedResult, SimulatedRun
from penstock.train.compare.trained import TrainingResult

MIB = 2**20


@dataclass(frozen=True)
class ComparisonRow:
    """One schedule. `trained` is None where nothing was trained."""

    name: str
    drain_every: int
    simulated: SimulatedResult
    trained: TrainingResult | None = None


@dataclass(frozen=True)
class Comparison:
    """All rows. The first is what the others are compared with.

    Attributes:
        costs: where they come from, in words.
        steps: how many each trained; 0 for none.
        tokens: of a microbatch, if the costs are those of a model on text.
        notices: how the runs differ besides the schedule.
        run: how they were simulated.
        memory_limit: bytes that a rank may hold, if a limit was given.
    """

    rows: Sequence[ComparisonRow]
    costs: str
    steps: int
    batch: int
    microbatches: int
    ranks: int
    tokens: float | None = None
    notices: Sequence[str] = ()
    run: SimulatedRun = AS_PLANNED
    memory_limit: float | None = None

    def fits(self, row: ComparisonRow) -> bool:
        """Whether no rank holds more than the limit. True without a limit."""
        return self.memory_limit is None or (row.simulated.memory or 0.0) <= self.memory_limit

    @property
    def best(self) -> ComparisonRow | None:
        """The fastest of those that fit; None if none does."""
        return max(filter(self.fits, self.rows), key=self.speedup, default=None)

    @property
    def interrupted(self) -> bool:
        return any(row.trained is not None and row.trained.interrupted for row in self.rows)

    def speedup(self, row: ComparisonRow) -> float:
        """How many times as fast as the first it is."""
        first = self.rows[0].simulated.microbatches_per_second
        return row.simulated.microbatches_per_second / first if first else 1.0

    @property
    def speed_unit(self) -> str:
        """The unit of a throughput."""
        return "microbatches/s" if self.tokens is None else "tokens/s"

    def per_second(self, row: ComparisonRow) -> float:
        """A row's throughput, in `speed_unit`."""
        return row.simulated.microbatches_per_second * (self.tokens or 1.0)

    def throughput(self, row: ComparisonRow) -> str:
        """A row's throughput with its unit."""
        return f"{_throughput(self.per_second(row))} {self.speed_unit}"

    @property
    def in_bytes(self) -> bool:
        """Whether the costs say what weights take, so that all memory can be counted in bytes."""
        return self.rows[0].simulated.memory is not None

    @property
    def held_unit(self) -> str:
        """The unit of `held`."""
        return "MiB" if self.in_bytes else "activations"

    def held(self, row: ComparisonRow) -> float:
        """What the fullest rank holds, in `held_unit`."""
        memory = row.simulated.memory
        return row.simulated.activations if memory is None else memory / MIB

    def to_json(self) -> dict[str, Any]:
        return {
            "costs": self.costs,
            "steps": self.steps,
            "batch": self.batch,
            "microbatches": self.microbatches,
            "ranks": self.ranks,
            "interrupted": self.interrupted,
            "links": self.run.links.texts(),
            "dispatch": self.run.dispatch,
            "memory_limit": self.memory_limit,
            "schedules": [self._row_json(row) for row in self.rows],
            "notices": list(self.notices),
        }

    def _row_json(self, row: ComparisonRow) -> dict[str, Any]:
        first = self.rows[0].trained
        told: dict[str, Any] = {"speedup": self.speedup(row)}
        if row.trained is not None and first is not None:
            told |= {"loss": row.trained.loss / first.loss, "train_loss": row.trained.train_loss / first.train_loss}
        speed = row.simulated.microbatches_per_second
        return {
            "name": row.name,
            "drain_every": row.drain_every,
            "fits": None if self.memory_limit is None else self.fits(row),
            "simulated": {
                **row.simulated.to_json(),
                "tokens_per_second": None if self.tokens is None else speed * self.tokens,
            },
            "trained": None if row.trained is None else row.trained.to_json(),
            "relative": told,
        }

    def head(self) -> list[str]:
        """The columns' names."""
        held = ["memory MiB" if self.in_bytes else "activations"]
        held += [] if self.memory_limit is None else ["fits"]
        learned = ["weights MiB", "updates", "train loss", "validation", "to first"] if self.steps else []
        return ["schedule", self.speed_unit, "speed", "busy", *held, "mismatch", "versions", *learned]

    def cells(self, row: ComparisonRow) -> list[str]:
        """A row's cells, as text."""
        found = row.simulated
        held = [f"{found.activations:.4g}" if found.memory is None else f"{self.held(row):,.1f}"]
        held += [] if self.memory_limit is None else ["yes" if self.fits(row) else "no"]
        cells = [
            row.name,
            _throughput(self.per_second(row)),
            f"{self.speedup(row):.2f}x",
            f"{found.busy:.1%}",
            *held,
            str(found.mismatch),
            str(found.versions),
        ]
        first, learned = self.rows[0].trained, row.trained
        if learned is None or first is None:
            return cells + [""] * (len(self.head()) - len(cells))
        return [
            *cells,
            f"{learned.state / MIB:,.1f}",
            str(learned.num_updates),
            f"{learned.train_loss:.3f}",
            f"{learned.loss:.3f}",
            f"{learned.loss / first.loss - 1:+.1%}",
        ]

    def words(self) -> list[str]:
        """What the figures mean: one sentence each, without capital and full stop."""
        trained = f"each trained {self.steps} steps on the same batches" if self.steps else "nothing was trained"
        lines = [
            f"{self.ranks} ranks run {self.microbatches} microbatches per step, in batches of {self.batch}; "
            f"{trained}",
            f"speed, busy and memory are simulated over {self.costs}, with a device per rank and {self.run.words()}",
        ]
        if self.memory_limit is not None:
            lines.append(self._said_of_memory())
        drained = {row.drain_every for row in self.rows if row.drain_every > 1}
        if drained:
            each = " or ".join(map(str, sorted(drained)))
            lines.append(f"asynchronous schedules drain every {each} steps, and the time that takes is counted")
        return lines

    def _said_of_memory(self) -> str:
        assert self.memory_limit is not None
        limit, fit = f"{self.memory_limit / MIB:,.1f} MiB", sum(map(self.fits, self.rows))
        if self.best is None:
            return f"none fits into {limit}"
        return f"{fit} of {len(self.rows)} fit into {limit}, of which {self.best.name} is the fastest"


def _throughput(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
