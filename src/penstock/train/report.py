"""The end report: whether it learned, how fast, and whether it ran as simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.cost import Costs, Links
from penstock.simulation import Blocking, Decoupled, Timeline, simulate
from penstock.train.run_report import RunReport
from penstock.train.tasks.task import ModelQuality
from penstock.train.update_report import UpdateReport, state_rows


@dataclass(frozen=True)
class TimingReport:
    """A measured step or pass, and the simulation of the same schedule with the run's own op times (ms)."""

    measured_makespan: float
    simulated_makespan: float
    measured_bubble_ratio: float
    simulated_bubble_ratio: float


@dataclass(frozen=True, kw_only=True)
class Report(RunReport):
    """The result of a run that learns.

    Attributes:
        model: its kind, or path. mesh: processes along "pp" (ranks), "dp" (replicas) and "tp" (shards of a layer).
        sharding: of the replicas' state.
        train_loss, tokens_per_second: of the whole mesh; None if no step was left to train. samples_per_second: in
            place of tokens, of a model that does not count tokens.
        loss: on the validation data. quality: what to compare it with; its numbers are beside the loss in the JSON.
        peak_memory: most bytes of each process (or device), by rank.
        updating: of a run whose updates were among its ops; None for others.
        deferred: for each stage whose backward is split, the share of the work on weight gradients that waited for W,
            and for which parameters it did not wait, and why.
        num_trained: the number of parameters that are trained; None if a report does not say.
        state: by rank, bytes of parameters, gradients, older versions and the optimizer's state.
    """

    num_parameters: int
    train_loss: float | None
    loss: float
    quality: ModelQuality
    tokens_per_second: float | None
    timing: TimingReport
    peak_memory: list[int]
    updating: UpdateReport | None = None
    state: list[dict[str, int]] = field(default_factory=list)
    deferred: list[dict[str, Any]] = field(default_factory=list)
    model: str = "gpt"
    mesh: dict[str, int] = field(default_factory=dict)
    sharding: str = "copies"
    samples_per_second: float | None = None
    num_trained: int | None = None

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        values.pop("quality")
        return values | self.quality.to_json()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        updating = value.get("updating")
        value |= {"updating": None if updating is None else UpdateReport(**updating)}
        value |= {"quality": ModelQuality.take(value)}
        return super().from_json({**value, "timing": TimingReport(**value["timing"])})

    def _trained(self) -> str:
        frozen = self.num_trained is not None and self.num_trained < self.num_parameters
        return f", of which {self.num_trained:,} learn" if frozen else ""

    def rows(self) -> list[tuple[str, str]]:
        timing = self.timing
        one = "one step" if self.updating is None else "one pass"
        speed = "no step was left to train"
        for rate, unit in ((self.tokens_per_second, "tokens"), (self.samples_per_second, "samples")):
            if rate is not None:
                speed = f"{rate:,.0f} {unit}/s over {self.seconds:.0f} s of steps"
        return [
            *self._mesh_rows(),
            ("model", f"{self.num_parameters:,} parameters{self._trained()}"),
            *self.quality.rows(self.loss),
            ("speed", speed),
            (one, f"{timing.measured_makespan:.1f} ms measured, {timing.simulated_makespan:.1f} ms simulated"),
            (
                "bubbles",
                f"{timing.measured_bubble_ratio:.1%} measured, {timing.simulated_bubble_ratio:.1%} simulated",
            ),
            *self._deferred_rows(),
            *(() if self.updating is None else self.updating.rows()),
            *(() if self.steered is None else self.steered.rows(adapted=True)),
            *state_rows(self.state),
            (
                "memory",
                ", ".join(f"{b / 2**20:,.0f}" for b in self.peak_memory)
                + f" MiB at most, by {'rank' if self.is_flat else 'process'}",
            ),
        ]

    def last_rows(self) -> list[tuple[str, str]]:
        rows = super().last_rows()
        if self.interrupted:
            rows.append(("go on", f"penstock train --resume {Path(self.files['metrics']).parent}"))
        return rows

    @property
    def is_flat(self) -> bool:
        """Whether there is one pipeline of whole layers."""
        return self.mesh.get("dp", 1) == self.mesh.get("tp", 1) == 1

    def _deferred_rows(self) -> list[tuple[str, str]]:
        """Empty if no backward is split."""
        if not self.deferred:
            return []
        shares = ", ".join(f"{each['share']:.0%}" for each in self.deferred)
        return [("put off", f"{shares} of the work on weight gradients waited for W, by stage")]

    def _mesh_rows(self) -> list[tuple[str, str]]:
        """Empty for one pipeline of whole layers."""
        if self.is_flat:
            return []
        dp, tp = self.mesh["dp"], self.mesh["tp"]
        words = f"{self.num_ranks * dp * tp} processes: pp {self.num_ranks} x dp {dp} x tp {tp}"
        return [("mesh", words + ("" if self.sharding in ("none", "copies") else f", {self.sharding}"))]


def timing_report(
    measured: Timeline, costs: Costs, links: Links | None = None, transport: Decoupled | Blocking | str = ""
) -> tuple[TimingReport, Timeline]:
    """Simulates what was measured, with the costs measured in the run and the link conditions injected into it."""
    simulated = simulate(
        measured.schedule,
        costs,
        links=links,
        dispatch=measured.dispatch,
        transport=transport or "decoupled",
    )
    report = TimingReport(measured.makespan, simulated.makespan, measured.bubble_ratio, simulated.bubble_ratio)
    return report, simulated
