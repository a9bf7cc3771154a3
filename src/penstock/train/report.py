"""The end report: whether it learned, how fast, whether it ran as simulated, and what updates among its ops did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.cost import Costs, Links
from penstock.runtime import Pipeline
from penstock.schedule import Schedule, count_versions
from penstock.simulation import Timeline, simulate
from penstock.simulation.transport import SimulatedTransport
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.run_report import RunReport
from penstock.train.settings import Settings


@dataclass(frozen=True)
class UpdateReport:
    """Updates of a run whose schedule has them as ops.

    Attributes:
        rule: which weights ops read. window: microbatches whose gradients an update adds up. drain_every:
            steps of a pass.
        one_copy_steps: whether only one copy of each stage has its optimizer's state.
        num_updates: over the whole run.
        proved, measured: most updates between a microbatch's forward and its backward, by the order, and as counted.
        met: share of (stage, microbatch) pairs with any.
        versions: most versions of its weights that a copy of a stage holds.
    """

    rule: str
    window: int
    drain_every: int
    one_copy_steps: bool
    num_updates: int
    proved: int
    measured: int
    met: float
    versions: int

    def words(self) -> str:
        """One line for people."""
        counted = "as proved" if self.proved == self.measured else f"proved; {self.measured} counted"
        return f"{self.num_updates}, {one_every(self.window)}; {bound(self.proved)}, {counted}"


def update_report(settings: Settings, pipe: Pipeline, num_updates: int, is_tied: bool) -> UpdateReport | None:
    """The report on the updates of what the pipeline ran last; None if updates are not ops. All ranks must call it.

    Args:
        is_tied: the first stage and the last one share a parameter.
    """
    schedule = pipe.schedule
    if schedule.updates is None or not settings.is_asynchronous:
        return None
    counted = pipe.mismatch()
    return UpdateReport(
        rule=schedule.updates.rule,
        window=settings.passes.window,
        drain_every=settings.passes.steps,
        one_copy_steps=settings.sharding != "none",
        num_updates=num_updates,
        proved=proved_mismatch(schedule),
        measured=max(counted.values(), default=0),
        met=sum(1 for count in counted.values() if count) / max(1, len(counted)),
        versions=most_versions(settings, schedule, is_tied),
    )


def most_versions(settings: Settings, schedule: Schedule, is_tied: bool = False) -> int:
    """The most versions of its weights that a copy of a stage holds in such a run."""
    tied = [[0, schedule.num_stages - 1]] if is_tied and schedule.num_stages > 1 else []
    counted = count_versions(schedule, sharding=settings.sharding, num_replicas=settings.dp, tied_stages=tied)
    return max(counted.values(), default=1)


def notices_of(settings: Settings) -> list[str]:
    """What the user should know about how such a run differs."""
    if settings.is_asynchronous and settings.clip:
        return [
            f"--clip {settings.clip:g}, over the root of the number of stages, was for each stage's gradient by "
            "itself: a norm over the model would make every stage wait for all"
        ]
    return []


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
        loss: on the validation data. unit: of it, in words.
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
    unit: str
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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        updating = value.get("updating")
        value |= {"loss": math.nan if value["loss"] is None else value["loss"]}  # JSON has no nan
        value |= {"updating": None if updating is None else UpdateReport(**updating)}
        return super().from_json({**value, "timing": TimingReport(**value["timing"])})

    @property
    def pace(self) -> str:
        parts = ["no step was left to train"]
        for rate, unit in ((self.tokens_per_second, "tokens"), (self.samples_per_second, "samples")):
            if rate is not None:
                parts = [f"{rate:,.0f} {unit}/s"]
        if self.num_ranks != math.prod(self.mesh.values()):
            parts.insert(0, " x ".join(f"{name} {count}" for name, count in self.mesh.items()))
        return ", ".join([*parts, f"at most {max(self.peak_memory) / 2**20:,.0f} MiB a process"])

    def rows(self) -> list[tuple[str, str]]:
        timing, updating = self.timing, self.updating
        took = f"{timing.measured_makespan:.1f} ms measured, {timing.simulated_makespan:.1f} ms simulated"
        bubbles = f"{timing.measured_bubble_ratio:.1%} and {timing.simulated_bubble_ratio:.1%}"
        rows = [
            ("loss", f"{self.loss:.3f} {self.unit}"),
            ("one step" if updating is None else "one pass", f"{took}; bubbles {bubbles}"),
        ]
        return rows if updating is None else [*rows, ("updates", updating.words())]


def timing_report(
    measured: Timeline,
    costs: Costs,
    links: Links | None = None,
    transport: SimulatedTransport | str = "decoupled",
) -> tuple[TimingReport, Timeline]:
    """Simulates what was measured, with the costs measured in the run and the link conditions injected into it."""
    simulated = simulate(
        measured.schedule,
        costs,
        links=links,
        dispatch=measured.dispatch,
        transport=transport,
    )
    report = TimingReport(measured.makespan, simulated.makespan, measured.bubble_ratio, simulated.bubble_ratio)
    return report, simulated
