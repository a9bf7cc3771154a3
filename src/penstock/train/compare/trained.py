"""Trains one contender: a run like any other, in this process or in one process per rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.job import TrainJob
from penstock.train.report import Report
from penstock.train.run_job import CheckedTraining, carry_out
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
    losses = [line["loss"] for line in lines]
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
