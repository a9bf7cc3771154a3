"""The learning part of a run: sends batches through the pipeline, pass by pass, and keeps track of the open
window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from penstock.runtime import Pipeline, RuntimeFailure, Verification
from penstock.runtime.checkpoint import CheckpointError
from penstock.runtime.execute.step_end import sum_in_order
from penstock.runtime.stage.batch_rules import split, uncut
from penstock.runtime.stage.loss import LossFn, adds_up, counts_of
from penstock.runtime.tensors.pytree import flatten
from penstock.schedule import count_mismatch
from penstock.train.asynchronous import Passes
from penstock.train.tasks.task import Example, TaskBatches


class PassResult(NamedTuple):
    """The result of a pass, by step.

    Attributes:
        first: its first step. losses: of each step's batch. rates: each step's. updates: so far, at the end of each.
        grad_norm: before clipping; None if there is not one norm for the step.
    """

    first: int
    losses: list[float]
    rates: list[float]
    updates: list[int]
    grad_norm: float | None
    seconds: float


class Training:
    """The position of a run, and its next pass.

    Args:
        loss: of a microbatch.
        replicas: of the pipeline. Each step's batch is divided among them.
        has_samples: whether samples of batches are counted, of which the last may have fewer.

    Attributes:
        steps: done so far. gathered: microbatches in the window that is open; 0 between windows.
        num_samples: in the batches of the last pass that this process was given; 0 if they are not counted.
    """

    def __init__(
        self,
        pipe: Pipeline,
        passes: Passes,
        batches: TaskBatches,
        rate: Callable[[int], float],
        is_asynchronous: bool,
        loss: LossFn,
        replicas: int,
        has_samples: bool,
    ) -> None:
        self.pipe, self.passes, self.rate = pipe, passes, rate
        self._loss, self._replicas, self._has_samples = loss, replicas, has_samples
        # What all replicas run together.
        self._of_all = replace(passes, microbatches=passes.microbatches * replicas, window=passes.window * replicas)
        self.steps = self.gathered = self.num_samples = 0
        self._batches = batches
        self._proved = count_mismatch(pipe.schedule) if is_asynchronous else None

    @property
    def meta(self) -> dict[str, int]:
        """The position of the run, as a checkpoint keeps it."""
        return {"steps": self.steps, "gathered": self.gathered}

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Continues at the position in a checkpoint. That of a run without passes counts only steps."""
        self.steps, self.gathered = position(meta, self.pipe.num_steps)

    def run_pass(self) -> PassResult:
        """Trains the next pass.

        Raises:
            RuntimeFailure: what `Pipeline.step` raises, or updates that were not where they had been proved to be.
        """
        first, before, gathered = self.steps, self.pipe.num_updates, self.gathered
        steps = range(first, first + self.passes.steps)
        rates, self.num_samples = [self.rate(step) for step in steps], 0
        began = time.perf_counter()
        losses, norm = self._synchronous(first) if self._proved is None else self._asynchronous(steps)
        seconds = time.perf_counter() - began
        self.steps, self.gathered = steps.stop, self.passes.after(gathered)
        updates = [before + self.passes.updates_by(step - first, gathered) for step in steps]
        return PassResult(first, losses, rates, updates, norm, seconds)

    def verify(self) -> Verification:
        """Verifies the next step; see `Pipeline.verify`."""
        return self.pipe.verify(*self._batches[self.steps])

    def probe(self, first: int) -> None:
        """Runs the pass that begins with a step, only for its times. The model must not be used afterwards."""
        if self._proved is None:
            self.pipe.step(*self._batches[first], update=False)
            self.pipe.zero_grad()
        else:
            self._asynchronous(range(first, first + self.passes.steps))

    def _synchronous(self, step: int) -> tuple[list[float], float | None]:
        rate, optimizer = self.rate(step), self.pipe.optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            group["lr"] = rate
        result = self.pipe.step(*self._batch(step))
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return [float(result.loss)], norm

    def _batch(self, step: int) -> Example:
        """The batch of a step, whose samples are counted."""
        batch = self._batches[step]
        self.num_samples += len(flatten(batch.inputs)[0][0]) if self._has_samples else 0
        return batch

    def _asynchronous(self, steps: range) -> tuple[list[float], float | None]:
        passes, loss = self.passes, self._loss
        batches = [_cut(self._batch(step), self._of_all.microbatches) for step in steps]
        inputs, targets = (list(chain(*parts)) for parts in zip(*batches, strict=True))
        rates = passes.rates(steps.start, self.rate)
        result = self.pipe.step(inputs, targets, rates=rates, update=passes.closes(self.gathered))
        self._check_mismatch()
        # Losses that add up are shares of their step's loss already.
        weights = [1.0] * len(inputs) if adds_up(loss) else self._of_all.weights(counts_of(inputs, targets, loss))
        shares = result.losses * torch.tensor(weights, dtype=result.losses.dtype) * passes.passes_a_window
        return [float(sum_in_order(part)) for part in shares.split(self._of_all.microbatches)], None

    def evaluate(self, batches: Iterable[Example]) -> float:
        """The mean loss of some batches, each cut like the batch of a step, or into fewer microbatches if small.

        If replicas have parts of their own, each takes as many batches as the one with the fewest.
        """
        if self._proved is not None:  # a pass would cut each batch into all its microbatches
            batches = (_cut(batch, self._num_for(batch)) for batch in batches)
        # If several passes fill a window, a loss is a part of the window's loss.
        return float(self.pipe.evaluate(self._had_by_all(batches)).loss) * self.passes.passes_a_window

    def _had_by_all(self, batches: Iterable[Example]) -> Iterator[Example]:
        """The first batches, until a process has no more of them."""
        for batch in batches:
            if not all(self.pipe.gather(True)):
                return
            yield batch
        self.pipe.gather(False)  # those that have another one ask

    def _num_for(self, batch: Example) -> int:
        """The microbatches of a batch that is evaluated: those of a step, or as many as it has samples for. Each
        replica has equally many.
        """
        num, most = self._of_all.microbatches, uncut(batch.inputs, "samples").most
        return max(most - most % self._replicas, self._replicas) if 0 < most < num else num

    def _check_mismatch(self) -> None:
        """Compares the mismatch counted during the pass with the one proved before. Raises RuntimeFailure."""
        counted = self.pipe.mismatch()
        if counted == self._proved:
            return
        assert self._proved is not None
        keys = sorted(set(counted) | set(self._proved))
        stage, pipeline, m = next(key for key in keys if counted.get(key) != self._proved.get(key))
        key = stage, pipeline, m
        raise RuntimeFailure(
            f"microbatch {m} met {counted.get(key)} updates of stage {stage} in pipeline {pipeline} between its "
            f"forward and its backward, and {self._proved.get(key)} were proved; this run can't be trusted: start "
            "anew from its last checkpoint, and report it"
        )


def _cut(batch: Example, num: int) -> Example:
    """A batch in lists of microbatches. A model that returns its loss has None for the targets of each."""
    return Example(*([None] * num if part is None else list(split(part, num, "samples")) for part in batch))


def position(meta: Mapping[str, Any] | None, num_steps: int) -> tuple[int, int]:
    """The position (steps, microbatches gathered) in a checkpoint's meta. Raises CheckpointError if these
    are not counts.
    """
    meta = meta or {}
    found = meta.get("steps", num_steps), meta.get("gathered", 0)
    if not all(isinstance(each, int) and each >= 0 for each in found):
        raise CheckpointError(
            f"the checkpoint says steps {found[0]!r} and gathered {found[1]!r}, which are no counts"
        )
    return found
