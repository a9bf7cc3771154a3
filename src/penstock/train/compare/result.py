"""What a comparison came to: a row a schedule, beside the first one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.train.compare.simulated import Simulated
from penstock.train.compare.trained import Trained

MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """One schedule. `trained` is None where nothing was trained."""

    name: str
    drain_every: int
    simulated: Simulated
    trained: Trained | None = None


@dataclass(frozen=True)
class Comparison:
    """All of them, the first being what the others are measured by.

    Attributes:
        costs: in words, where they come from. tokens: of a microbatch, where the costs are of the model trained.
        steps: trained; 0 for none.
    """

    rows: Sequence[Compared]
    costs: str
    steps: int
    batch: int
    microbatches: int
    ranks: int
    tokens: float | None = None
    notices: Sequence[str] = ()

    @property
    def interrupted(self) -> bool:
        return any(row.trained is not None and row.trained.interrupted for row in self.rows)

    def speedup(self, row: Compared) -> float:
        """How many times as fast as the first."""
        first = self.rows[0].simulated.microbatches_per_second
        return row.simulated.microbatches_per_second / first if first else 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "costs": self.costs,
            "steps": self.steps,
            "batch": self.batch,
            "microbatches": self.microbatches,
            "ranks": self.ranks,
            "interrupted": self.interrupted,
            "schedules": [self._row_json(row) for row in self.rows],
            "notices": list(self.notices),
        }

    def _row_json(self, row: Compared) -> dict[str, Any]:
        first = self.rows[0].trained
        told: dict[str, Any] = {"speedup": self.speedup(row)}
        if row.trained is not None and first is not None:
            told |= {"loss": row.trained.loss / first.loss, "train_loss": row.trained.train_loss / first.train_loss}
        speed = row.simulated.microbatches_per_second
        return {
            "name": row.name,
            "drain_every": row.drain_every,
            "simulated": {
                **row.simulated.to_json(),
                "tokens_per_second": None if self.tokens is None else speed * self.tokens,
            },
            "trained": None if row.trained is None else row.trained.to_json(),
            "relative": told,
        }

    def head(self) -> list[str]:
        """The columns' names."""
        speed = "microbatches/s" if self.tokens is None else "tokens/s"
        held = "memory MiB" if self.rows[0].simulated.memory is not None else "activations"
        learned = ["weights MiB", "updates", "train loss", "validation", "to first"] if self.steps else []
        return ["schedule", speed, "speed", "busy", held, "mismatch", "versions", *learned]

    def cells(self, row: Compared) -> list[str]:
        """A row's cells, as text."""
        found = row.simulated
        speed = found.microbatches_per_second * (self.tokens or 1.0)
        held = f"{found.activations:.4g}" if found.memory is None else f"{found.memory / MIB:,.1f}"
        cells = [
            row.name,
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
            f"{self.speedup(row):.2f}x",
            f"{found.busy:.1%}",
            held,
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
        """What the figures mean."""
        trained = f"; trained {self.steps} steps on the same batches" if self.steps else "; nothing was trained"
        lines = [
            f"{self.ranks} ranks, {self.microbatches} microbatches a step, batches of {self.batch}{trained}",
            f"speed, busy and memory by simulation over {self.costs}, a device per rank, without delays on links",
        ]
        drained = {row.drain_every for row in self.rows if row.drain_every > 1}
        if drained:
            each = " or ".join(map(str, sorted(drained)))
            lines.append(f"the asynchronous ones drain every {each} steps, which is counted")
        return lines
