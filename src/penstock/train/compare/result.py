"""The result of a comparison: what simulation says of each schedule, and what training it gave.

It has a row per schedule, each compared with the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.cost import Costs, Links
from penstock.report.run_record import strict_json
from penstock.schedule import Schedule, count_versions
from penstock.schedule.op import UPDATE
from penstock.schedule.updates import OWNER
from penstock.simulation import Timeline, simulate
from penstock.simulation.memory_footprint import footprint
from penstock.train.asynchronous import proved_mismatch
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.job import TrainJob
from penstock.train.report import Report
from penstock.train.run_job import CheckedTraining, carry_out
from penstock.train.settings import Settings
from penstock.train.start import RunFailed


@dataclass(frozen=True)
class TrainingResult:
    """What training a schedule gave.

    Attributes:
        train_loss: mean over the last tenth of the steps. loss: on the validation text, at the end.
        num_updates: how many were made. mismatch: counted while it ran.
        state: bytes of weights, versions, gradients and optimizer on the rank that has most.
        losses, updates: per step, its loss and the updates made by its end.
        tokens_per_second: measured here; None for a run whose ranks took turns in one process.
    """

    train_loss: float
    loss: float
    num_updates: int
    mismatch: int
    state: int
    losses: Sequence[float]
    updates: Sequence[int]
    tokens_per_second: float | None
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def trained(inputs: Inputs, folder: Path) -> TrainingResult:
    """Trains, and writes the run into `folder`.

    Raises:
        RunFailed: a rank failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = TrainJob(settings=inputs.settings, folder=str(folder), as_json=True)
    report, code, said = carry_out(CheckedTraining(order, inputs))
    if not isinstance(report, Report):
        raise RunFailed(f"{inputs.settings.schedule}: {said}", code or 1)
    return read_trained(report, RunFolder(folder).metrics, inputs.settings.in_process)


def read_trained(report: Report, metrics: Path, in_process: bool) -> TrainingResult:
    """Reads the result from a run's report and metrics."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    last = losses[-max(1, len(losses) // 10) :]
    updates = [line.get("updates", line["step"] + 1) for line in lines]
    return TrainingResult(
        train_loss=sum(last) / len(last),
        loss=report.loss,
        num_updates=updates[-1],
        mismatch=0 if report.updating is None else report.updating.measured,
        state=max(sum(rank.values()) for rank in report.state),
        losses=losses,
        updates=updates,
        tokens_per_second=None if in_process else report.tokens_per_second,
        interrupted=report.interrupted,
    )


Costing = Callable[[Schedule], Costs]
"""Makes the costs of a schedule's stages from costs that are the same for all schedules."""


@dataclass(frozen=True)
class SimulatedRun:
    """How all schedules are simulated over the costs.

    Attributes:
        links: between the ranks. On links that are not named, messages arrive at once.
        dispatch: how ranks choose their ops.
    """

    links: Links = field(default_factory=Links)
    dispatch: str = "frozen"

    def words(self) -> str:
        """Links and dispatch, in words that follow a comma."""
        texts = self.links.texts()
        if self.links.default is not None:
            texts.append(f"{'all others' if texts else 'all'} {self.links.default}")
        links = f"links {', '.join(texts)}" if texts else "no delays on links"
        return links if self.dispatch == "frozen" else f"{links} and {self.dispatch} dispatch"


AS_PLANNED = SimulatedRun()
"""No delays, and every rank in its own order."""


@dataclass(frozen=True)
class SimulatedResult:
    """What simulation says of a schedule.

    Attributes:
        milliseconds: of a step, with its share of the update.
        microbatches_per_second: over a whole pass, from its first op to the end of its last update.
        busy: the share of all ranks' time in which they run ops or update.
        memory: bytes that the fullest rank holds: weights, versions, gradients, the optimizer's state, activations,
            messages. None if the costs do not say what weights take.
        activations: the part of `memory` that is activations. If `memory` is None, the most that a rank holds, in the
            units of the costs.
        mismatch: most updates between a microbatch's forward and its backward; 0 for a synchronous schedule.
        versions: most versions of its weights that a copy of a stage holds.
        timeline: of the pass, without the update that follows a synchronous schedule. It is not in the JSON.
    """

    milliseconds: float
    microbatches_per_second: float
    busy: float
    memory: float | None
    activations: float
    mismatch: int
    versions: int
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """All but the timeline."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "timeline"}


def simulated(
    settings: Settings, schedule: Schedule, costs: Costs, run: SimulatedRun = AS_PLANNED
) -> SimulatedResult:
    """Simulates a pass.

    With a synchronous schedule, every rank updates the stages it owns after its last op, and the next step begins
    when the slowest rank has updated. An asynchronous schedule has its updates among the other ops.
    """
    costs = costs.with_predictions(schedule, settings.sharding)
    timeline = simulate(schedule, costs, run.links, dispatch=run.dispatch)
    after = [0.0] * schedule.num_ranks
    if schedule.updates is None:
        for stage in range(schedule.num_stages):
            after[schedule.rank_of(stage, OWNER)] += costs.duration(UPDATE, stage)
    whole = timeline.makespan + max(after)
    held = None
    if costs.weight_bytes:
        held = footprint(schedule, costs, run.links, dispatch=run.dispatch, sharding=settings.sharding)
    return SimulatedResult(
        milliseconds=whole / settings.passes.steps,
        microbatches_per_second=schedule.num_microbatches / whole * 1e3 if whole else 0.0,
        busy=(sum(timeline.busy) + sum(after)) / (schedule.num_ranks * whole) if whole else 1.0,
        memory=None if held is None else held.peak,
        activations=max(timeline.peak_activations),
        mismatch=proved_mismatch(schedule),
        versions=max(count_versions(schedule, sharding=settings.sharding).values(), default=1),
        timeline=timeline,
    )


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
        value = {
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
        found: dict[str, Any] = strict_json(value)
        return found

    def _row_json(self, row: ComparisonRow) -> dict[str, Any]:
        first = self.rows[0].trained
        ratios: dict[str, Any] = {"speedup": self.speedup(row)}
        if row.trained is not None and first is not None:
            ratios |= {"loss": row.trained.loss / first.loss, "train_loss": row.trained.train_loss / first.train_loss}
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
            "relative": ratios,
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
