"""Each step's batch as it was planned, the same on all ranks, and recorded so that a run can be repeated.

A line of `batches.jsonl` has the numbers of a step's sequences, by replica and by microbatch, in the order in which
the microbatches ran. It also has the best dispatch of each replica. `--packing FILE` takes the batches of a run
from this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from penstock.dispatch import Dispatch
from penstock.planning.batches import BatchPlan
from penstock.runtime.errors import RuntimeFailure
from penstock.train.checks import SettingsError
from penstock.train.folder import writing
from penstock.train.tasks.documents import Documents
from penstock.train.tasks.task import Example

Microbatches = list[list[list[int]]]
"""Sequences by replica and microbatch."""


class StepBatch(NamedTuple):
    """A step's batch: its sequences, and the dispatch of each replica; empty if nothing chose one."""

    microbatches: Microbatches
    dispatches: tuple[str, ...]


class BatchRecord:
    """The batches of steps as they are recorded.

    Args:
        path: of the file. Batches that it already has are read.

    Raises:
        SettingsError: a line that is not a batch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_bytes() if path.exists() else b""
        self._whole = text.rfind(b"\n") + 1  # a line that was cut off where a run was killed is planned again
        lines = text[: self._whole].decode("utf-8", "replace").splitlines()
        self._steps = dict(_read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1))

    def find(self, step: int, documents: Documents) -> StepBatch | None:
        """The batch of a step; None if there is none, or if it has other sequences or other counts."""
        batch = self._steps.get(step)
        if batch is None or len(batch.microbatches) != documents.num_replicas:
            return None
        found = batch.microbatches
        if any(len(own) != documents.num_microbatches or not all(own) for own in found):
            return None
        same = sorted(chain(*chain(*found))) == sorted(documents.of_step(step))
        return batch if same else None

    def write(self, step: int, batch: StepBatch, values: dict[str, Any]) -> None:
        self._steps[step] = batch
        line = json.dumps({"step": step, **batch._asdict(), **values}) + "\n"
        with writing(self.path, f"the batch of step {step}"), self.path.open("ab") as file:
            file.truncate(self._whole)
            file.write(line.encode())
            self._whole = file.tell()


def _read_line(line: str, where: str) -> tuple[int, StepBatch]:
    try:
        value = json.loads(line)
        step, found, dispatches = value["step"], value["microbatches"], tuple(value.get("dispatches", ()))
        fine = isinstance(step, int) and all(isinstance(k, int) for own in found for each in own for k in each)
        fine = fine and (not dispatches or (len(dispatches) == len(found) and {*dispatches} <= {*map(str, Dispatch)}))
    except (ValueError, KeyError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise SettingsError(
            f"{where} is no batch: it has a step, sequences by replica and microbatch, and dispatches by replica"
        )
    return step, StepBatch(found, dispatches)


def recorded_batches(path: Path, documents: Documents, steps: range) -> BatchRecord:
    """The record of a run that is to be repeated.

    Raises:
        SettingsError: it can't be read, or lacks a step of the run, or has it with other sequences.
    """
    if not path.is_file():
        raise SettingsError(
            f"--packing {path}: no such file; give windows, arrival, planned, or the batches.jsonl of a run"
        )
    record = BatchRecord(path)
    for step in steps:
        if record.find(step, documents) is None:
            raise SettingsError(
                f"--packing {path} has no batch of step {step} with the {len(documents.of_step(step))} sequences "
                f"that it has here, in {documents.num_replicas} x {documents.num_microbatches} microbatches; give "
                "the data, --seed, --batch, --context, --dp and --microbatches of the run that wrote it, and no more "
                "steps"
            )
    return record


class PlannedBatches:
    """The batches of a run: planned when their step begins, or as they were recorded.

    Args:
        plan: `plan_batch` for the run, which lacks lengths and costs; None for a run that repeats a record.
        record: where the first rank writes batches; None on the others.
        share: gives every rank the first rank's value. run: is called with the dispatch of each replica.
    """

    def __init__(
        self,
        documents: Documents,
        plan: Callable[..., BatchPlan] | None,
        record: BatchRecord | None,
        share: Callable[[Any], Any],
        run: Callable[[Sequence[str]], None],
    ) -> None:
        self._documents, self._plan, self._record = documents, plan, record
        self._share, self._run = share, run
        self._plans: list[BatchPlan] = []

    def __getitem__(self, step: int) -> Example:
        """The batch of a step. Raises RuntimeFailure if no plan keeps the limits."""
        chosen = self._share(None if self._record is None else tuple(self._chosen(step, self._record)))
        microbatches, dispatches = chosen
        if dispatches:
            self._run(dispatches)
        return self._documents.example(list(chain(*microbatches)))

    def _chosen(self, step: int, record: BatchRecord) -> StepBatch:
        found = record.find(step, self._documents)
        if found is not None:
            return found
        assert self._plan is not None
        own = self._documents.of_step(step)
        try:
            plan = self._plan(self._documents.lengths(own), costs=self._documents.costs)
        except ValueError as error:
            raise RuntimeFailure(f"the batch of step {step} can't be planned: {error}") from None
        microbatches = [[[own[k] for k in each] for each in replica] for replica in plan.microbatches]
        found = StepBatch(microbatches, tuple(each.value for each in plan.dispatches))
        self._plans.append(plan)
        values = {"packing": plan.packing, "rules": plan.rules, "gain": plan.gain, "seconds": plan.seconds}
        record.write(step, found, values)
        return found

    def told(self) -> list[str]:
        """A notice about the plans of the run, if it made any."""
        if not self._plans:
            return []
        gain, ms = fmean(plan.gain for plan in self._plans), 1e3 * fmean(plan.seconds for plan in self._plans)
        return [
            f"batches were planned from lengths, {len(self._plans)} of them in {ms:.0f} ms each: predicted "
            f"{1 + gain:.2f} times as fast as in order of arrival"
        ]
