"""Whole documents for a decoder: each microbatch has several in one row, and each document is hidden from the
others. How a step's documents are packed is planned for the schedule, or recorded by an earlier run.

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

import torch
from torch import Tensor

from penstock.cost import CostsByLength
from penstock.data import Corpus, Sequences, Tokenizer, open_corpus
from penstock.dispatch import Dispatch
from penstock.planning.batches import BatchPlan, PackingError, pack_in_turn
from penstock.runtime.errors import RuntimeFailure
from penstock.train.checks import SettingsError
from penstock.train.folder import writing
from penstock.train.settings import Settings
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, TaskData
from penstock.train.tasks.text import next_token_unit

BatchForm = Callable[[Tensor, Tensor], Any]
"""Makes a model's input of tokens[1, T] and the lengths[n] of the sequences in them."""


def as_gpt_takes_it(tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens, "lengths": lengths}


class Documents:
    """The documents that each step packs into its microbatches. As batches, they are packed in order of arrival.

    Args:
        sequences: the documents, cut at the context.
        num_replicas, num_microbatches: into how many of each a step's documents are packed.
        costs: of the stages, by the lengths of the documents in a microbatch.
        form: makes the model's input of a row of documents.
    """

    def __init__(
        self, sequences: Sequences, num_replicas: int, num_microbatches: int, costs: CostsByLength, form: BatchForm
    ) -> None:
        self.sequences, self.num_replicas, self.num_microbatches = sequences, num_replicas, num_microbatches
        self.costs = costs
        self._form = form

    def of_step(self, step: int) -> list[int]:
        """The numbers of a step's documents, in order of arrival."""
        found: list[int] = self.sequences.of_step(step).tolist()
        return found

    def lengths(self, sequences: Sequence[int]) -> list[int]:
        """The tokens of each of these documents."""
        found: list[int] = self.sequences.lengths[list(sequences)].tolist()
        return found

    def __getitem__(self, step: int) -> Example:
        own = self.of_step(step)
        bins = pack_in_turn(self.lengths(own), self.num_replicas * self.num_microbatches)
        return self.example([[own[k] for k in each] for each in bins])

    def example(self, microbatches: Sequence[Sequence[int]]) -> Example:
        """A batch with these documents in each microbatch."""
        return packed_example(self.sequences, microbatches, self._form)


def packed_example(sequences: Sequences, microbatches: Sequence[Sequence[int]], form: BatchForm) -> Example:
    """A batch with the sequences of each microbatch in one row."""
    rows = [sequences.row(each) for each in microbatches]
    inputs = [form(torch.from_numpy(row.inputs), torch.from_numpy(row.lengths)) for row in rows]
    return Example(inputs, [torch.from_numpy(row.targets) for row in rows])


def packed_documents(
    settings: Settings,
    tokenizer: Tokenizer,
    context: int,
    corpus: Corpus | None,
    costs: CostsByLength,
    form: BatchForm = as_gpt_takes_it,
) -> TaskData:
    """The documents of a text.

    Args:
        context: tokens beyond which a document is cut.
        corpus: the text, if it is open already.
        costs: of the stages, by the lengths of the documents in a microbatch.
        form: how rows are given to the model.

    Raises:
        DataError, PackingError: a text that is too short.
        SettingsError: microbatches with no room for a document.
    """
    most = settings.microbatch_tokens
    if most is not None and most < context:
        raise SettingsError(
            f"--set microbatch_tokens={most} leaves no room for a document of the context's length, {context}; give "
            "at least that"
        )
    corpus = corpus or open_corpus(settings.data, tokenizer)
    train = Sequences(
        corpus.train, corpus.train_starts, context, settings.batch * context, settings.seed, corpus.vocab_size
    )
    documents = Documents(train, settings.dp, settings.microbatches, costs, form)
    documents.example([documents.of_step(0)])
    return TaskData(
        corpus.description,
        next_token_unit(tokenizer),
        corpus.digest,
        documents,
        _validation(settings, corpus, context, form),
        corpus,
        documents,
    )


def _validation(settings: Settings, corpus: Corpus, context: int, form: BatchForm) -> list[Example]:
    """Up to four fixed batches, packed in order of arrival; with fewer microbatches if the text is too short."""
    whole = Sequences(corpus.validation, corpus.validation_starts, context, context, 0, corpus.vocab_size)
    size = min(settings.batch * context, whole.num_tokens)
    count = max(1, min(VALIDATION_BATCHES, whole.num_tokens // size))
    found = []
    for part in pack_in_turn(whole.lengths, count):
        own, tokens = [], 0
        for k in part:
            if tokens < size:
                own.append(k)
                tokens += int(whole.lengths[k])
        num = min(settings.microbatches, len(own) // settings.dp) * settings.dp
        if num < 1:
            raise PackingError(
                f"the validation text has {len(own)} sequences for {settings.dp} replicas; give more text, or a "
                "smaller --context"
            )
        bins = pack_in_turn(whole.lengths[own], num)
        found.append(packed_example(whole, [[own[k] for k in each] for each in bins], form))
    return found


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
