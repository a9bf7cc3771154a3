"""A small GPT or BERT on real text, trained by a method: how its validation loss falls.

The model has 8 stages on 8 ranks, all in this process. Losses do not depend on that: a schedule with updates is an
order of ops, and gives the same parameters to the last bit however many processes run it. What a method would take
on eight accelerators is for the simulator to say; a run here says only what it learns.

A *batch* is what the synchronous methods update by; the others see the same samples in the same order, and their
learning rate follows the batch that a sample belongs to.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import penstock as ps
from experiments.amdp.merging import merged
from experiments.amdp.together import RunByRun, SumOfLosses, joined, stacked
from experiments.common.results import Row
from penstock.data import Batches, Corpus, MaskedText, open_corpus, validation_batches
from penstock.models import BERTConfig, BERTLoss, CrossEntropy, GPTConfig, bert_stage, gpt_stage
from penstock.runtime import MuonAdamW, Stage
from penstock.runtime.stage.batch_rules import split
from penstock.schedule import TENTATIVE
from penstock.train.settings import learning_rate
from penstock.train.tasks.chain import masked_batches

NUM_STAGES = 8

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, betas=(0.9, 0.95)),
    "Muon": functools.partial(MuonAdamW, betas=(0.9, 0.95), weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "NAdam": functools.partial(
        torch.optim.NAdam, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True, momentum_decay=0.004
    ),
}
"""AdamW as `penstock train` has it; SGD with momentum, which SpecTrain needs; NAdam as vNAG's authors set it; Muon
for hidden matrices with AdamW for the rest."""


@dataclass(frozen=True)
class Task:
    """What is learnt, and for how long.

    Attributes:
        config: sizes of a GPT or of a BERT.
        batch: samples that the synchronous methods update by.
        samples: of a microbatch.
        num_batches: seen in all.
        every: batches of a pass: the pipelines fill at its start and drain at its end, where the loss is measured.
        warmup: batches in which the learning rate rises; it then falls to a tenth along a cosine.
        seed: of the data's order and of the first weights.
    """

    config: GPTConfig | BERTConfig = field(
        default=GPTConfig(vocab_size=256, context=16, depth=8, width=64, num_heads=4)
    )
    batch: int = 32
    samples: int = 1
    num_batches: int = 1000
    every: int = 50
    warmup: int = 50
    seed: int = 0

    @property
    def num_microbatches(self) -> int:
        """Of a batch."""
        return self.batch // self.samples

    def rate(self, batch: int, peak: float) -> float:
        return learning_rate(batch, self.num_batches, peak, self.warmup, "cosine")


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: in tables.
        schedule: of the library; one without updates as ops is synchronous.
        window: microbatches an update gathers; None for those of a batch.
        optimizer: one of `OPTIMIZERS`.
        peak: learning rate, the most that is reached.
        options: what the schedule takes besides.
        samples: of a microbatch, where not the task's.
        rule: by which ops read weights, where not the schedule's own.
        seed: of the data's order, where not the task's.
        optimizer_options: in place of those that `OPTIMIZERS` has.
    """

    name: str
    schedule: str = "1f1b"
    window: int | None = None
    optimizer: str = "AdamW"
    peak: float = 3e-3
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    rule: str | None = None
    seed: int | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_synchronous(self) -> bool:
        return self.schedule == "1f1b"


@functools.cache
def corpus() -> Corpus:
    """The standard library's text, as bytes."""
    return open_corpus()


def train(method: Method, task: Task, say: Callable[[str], None] = lambda text: None) -> Row:
    """Trains by a method and returns what there is to know of it.

    The row has `losses`, the mean over each batch as it was trained on; `curve`, (batches seen, validation loss)
    after each pass, on the newest weights, pipelines drained; `mismatch`, most updates between a forward and its
    backward; and `seconds`, of this process. A run that diverges ends there, with a `final` of None.
    """
    return train_together([method], [task], say)[0]


def train_together(
    methods: Sequence[Method], tasks: Sequence[Task], say: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """The rows of runs that differ in rates and seeds alone, trained as one model (`together.py`); of one, plainly.

    The rows of several runs have their share of `seconds`, and no `losses`.

    Raises:
        ValueError: runs that differ in something else, or that can't go together (`goes_together`).
    """
    torch.set_num_threads(1)
    first, task = methods[0], tasks[0]
    if any(replace(each, peak=0.0, seed=None) != replace(first, peak=0.0, seed=None) for each in methods) or any(
        replace(each, seed=0) != replace(task, seed=0) for each in tasks
    ):
        raise ValueError("runs of one model differ in rates and seeds alone; train these one by one")
    if first.samples is not None:
        tasks = [replace(each, samples=first.samples) for each in tasks]
        task = tasks[0]
    window = first.window or task.num_microbatches
    began = time.process_time()
    losses: list[float] = []
    curves: list[list[tuple[int, float]]] = [[] for _ in tasks]
    with Passes(methods, tasks, window) as passes:
        for batches in _in_passes(task):
            losses += passes.train(batches)
            for curve, loss in zip(curves, passes.evaluate(), strict=True):
                if math.isfinite(loss) and (not batches.start or (curve and curve[-1][0] == batches.start)):
                    curve.append((batches.stop, loss))
            if all(not curve or curve[-1][0] < batches.stop for curve in curves):
                break
            now = ", ".join(f"{curve[-1][1]:.4f}" for curve in curves if curve)
            say(f"{first.name}: {batches.stop} of {task.num_batches} batches, loss {now}")
        mismatch = passes.mismatch()
    seconds = (time.process_time() - began) / len(tasks)
    return [
        {
            "method": first.name,
            "schedule": first.schedule,
            "optimizer": first.optimizer,
            "peak": method.peak,
            "window": window,
            "samples": task.samples,
            "updates": task.num_batches * (-(-task.num_microbatches // window)),
            "mismatch": mismatch,
            "final": curve[-1][1] if curve and curve[-1][0] == task.num_batches else None,
            "seconds": seconds,
            "curve": curve,
            **({"losses": losses} if len(tasks) == 1 else {}),
        }
        for method, curve in zip(methods, curves, strict=True)
    ]


def _in_passes(task: Task) -> Iterator[range]:
    for start in range(0, task.num_batches, task.every):
        yield range(start, min(start + task.every, task.num_batches))


class Passes:
    """A pipeline of a method over the task's text, which trains some batches at a time; several runs as one model.

    Microbatches of a window that meet the same weights are one (`merging.py`), unless `merges` is False; what a run
    comes to differs by rounding.
    """

    def __init__(self, methods: Sequence[Method], tasks: Sequence[Task], window: int, merges: bool = True) -> None:
        self._method, self._task, self._window = method, task, window = methods[0], tasks[0], window
        text = corpus()
        orders = [
            each.seed if method.seed is None else method.seed for method, each in zip(methods, tasks, strict=True)
        ]
        data = [data_of(each, text, order) for each, order in zip(tasks, orders, strict=True)]
        self._batches = [batches for batches, _ in data]
        self._held_out = [
            tuple(map(joined, zip(*batches, strict=True)))
            for batches in zip(*(each for _, each in data), strict=True)
        ]
        seeds = [each.seed for each in tasks]
        loss_fn = BERTLoss() if isinstance(task.config, BERTConfig) else CrossEntropy()
        self._sum = SumOfLosses(loss_fn, len(tasks)) if len(tasks) > 1 else None
        schedule = self._schedule()
        self._members: Sequence[Sequence[int]] | None = None
        """Of each microbatch that is run those of the method's own; None where they are the same."""
        if merges and not method.is_synchronous and window > 1:
            found = merged(schedule)
            schedule, self._members = found.schedule, found.members
        self._pipe = ps.Pipeline(
            [functools.partial(_stage_of, task.config, part, seeds) for part in cut(task.config)],
            schedule,
            loss_fn=self._sum or loss_fn,
            optimizer=_optimizer_of(methods),
            # Every copy of a stage predicts for itself, but the owner alone makes a tentative step.
            parallel=ps.ParallelOptions(sharding="copies" if method.rule in (None, TENTATIVE) else "none"),
        )

    def _schedule(self) -> ps.Schedule:
        """Of a window where updates are no ops, of all batches of a pass where they are."""
        method, num = self._method, self._task.num_microbatches * self._task.every
        if method.is_synchronous:
            return ps.build(method.schedule, NUM_STAGES, self._window)
        if method.rule == TENTATIVE:  # its ops are in the order
            return ps.build(method.schedule, NUM_STAGES, num, window=self._window, rule=TENTATIVE)
        if method.rule is not None:
            found = ps.build(method.schedule, NUM_STAGES, num, window=self._window)
            return replace(found, updates=ps.schedule.Updates(self._window, rule=method.rule))
        return ps.build(method.schedule, NUM_STAGES, num, window=self._window, **method.options)

    def train(self, batches: range) -> list[float]:
        """Trains on them and returns the mean loss of each, as it was trained on."""
        num = self._task.num_microbatches
        inputs, targets = self._entries(batches)
        starts = range(0, len(batches) * num, self._window)
        rates = [self._task.rate(batches.start + at // num, self._method.peak) for at in starts]
        if self._method.is_synchronous:
            losses = [
                loss
                for at, rate in zip(starts, rates, strict=True)
                for loss in self._update(inputs[at : at + self._window], targets[at : at + self._window], rate)
            ]
        else:
            losses = [float(loss) for loss in self._pipe.step(inputs, targets, rates=rates).losses]
        # Those of a window are weighed, and add up to its mean.
        each = len(losses) // len(batches)
        return [sum(losses[at : at + each]) * self._window / num for at in range(0, len(losses), each)]

    def _update(self, inputs: list[Tensor], targets: list[Tensor], rate: float) -> list[float]:
        for group in self._pipe.optimizer.param_groups:
            group["lr"] = rate
        return [float(loss) for loss in self._pipe.step(inputs, targets).losses]

    def _entries(self, batches: range) -> tuple[list[Any], list[Any]]:
        """Inputs and targets of some batches, an entry a microbatch of the schedule that is run."""
        num = self._task.num_microbatches
        of_sides: tuple[list[list[Any]], list[list[Any]]] = ([], [])  # by run, then by the method's own microbatch
        for own in self._batches:
            found: tuple[list[Any], list[Any]] = ([], [])
            for batch in batches:
                for microbatches, side in zip(found, own(batch), strict=True):
                    microbatches += split(side, num, "samples")
            for runs, microbatches in zip(of_sides, found, strict=True):
                runs.append(microbatches)
        groups = self._members or [(m,) for m in range(len(of_sides[0][0]))]
        inputs, targets = ([joined([run[m] for run in runs for m in group]) for group in groups] for runs in of_sides)
        return inputs, targets

    def evaluate(self) -> list[float]:
        """Each run's mean over the text held out."""
        inputs, targets = ([batch[side] for batch in self._held_out] for side in (0, 1))
        # As many at a time as the schedule has microbatches, which may be fewer.
        each = min(len(inputs), self._pipe.schedule.num_microbatches)
        total = 0.0
        for at in range(0, len(inputs), each):
            some = inputs[at : at + each], targets[at : at + each]
            total += float(self._pipe.evaluate(*some).loss) * len(some[0])
        return [total / len(inputs)] if self._sum is None else self._sum.means()

    def mismatch(self) -> int:
        """Most updates between a forward and its backward in the last pass, as counted while it ran."""
        return 0 if self._method.is_synchronous else max(self._pipe.mismatch().values())

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()


Batch = tuple[Any, Any]
"""Inputs and targets."""


def data_of(task: Task, text: Corpus, order: int) -> tuple[Callable[[int], Batch], list[Batch]]:
    """A batch by its number, and the batches held out."""
    context = task.config.context
    if isinstance(task.config, BERTConfig):
        masked = MaskedText(text.train, text.vocab_size, context, order)
        fresh = MaskedText(text.validation, text.vocab_size, context, 0)
        return lambda number: _masked(masked, number, task.batch), [_masked(fresh, n, 64) for n in range(32)]
    batches = Batches(text.train, task.batch, context, order)
    held_out = validation_batches(text.validation, 64, context, 32)
    return lambda number: _tensors(batches[number]), [_tensors(batch) for batch in held_out]


def _tensors(batch: Any) -> Batch:
    x, y = map(torch.from_numpy, batch)
    return x, y


def _masked(text: MaskedText, number: int, size: int) -> Batch:
    example = masked_batches(text, size)[number]
    return example.inputs, example.targets


def _stage_of(config: GPTConfig | BERTConfig, part: Sequence[int], seeds: Sequence[int]) -> Stage:
    make = (
        functools.partial(bert_stage, config)
        if isinstance(config, BERTConfig)
        else functools.partial(gpt_stage, config)
    )
    stages = [make(part, seed) for seed in seeds]
    if len(stages) > 1:
        for layers in zip(*(stage.in_order for stage in stages), strict=True):
            stages[0].replace(layers[0], stacked(layers))
    return stages[0]


def _optimizer_of(methods: Sequence[Method]) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer of all runs: torch's own over whole stacks, but where it can't be."""
    method = methods[0]
    make = functools.partial(OPTIMIZERS[method.optimizer], **method.optimizer_options)
    rates = {each.peak for each in methods}
    if len(methods) == 1 or (len(rates) == 1 and method.optimizer != "Muon"):
        return functools.partial(make, lr=method.peak)
    if not goes_together(method, len(rates)):
        raise ValueError(
            f"{method.name} reads weights by a rule that asks for the optimizer itself; train its runs one by one"
        )
    return functools.partial(
        RunByRun, make=make, lr=method.peak, factors=[each.peak / method.peak for each in methods]
    )


def goes_together(method: Method, num_rates: int = 1) -> bool:
    """Whether runs of a method can be one model.

    A rule that predicts or steps tentatively reads the optimizer's state, and vNAG's asks for NAdam. Of such a method
    only runs of one rate go together, and of Muon none.
    """
    rule = method.rule or method.schedule
    return rule not in ("xpipe", "spectrain", "vnag", TENTATIVE) or (num_rates == 1 and method.optimizer != "Muon")


def cut(config: GPTConfig | BERTConfig, num_stages: int = NUM_STAGES) -> list[list[int]]:
    """The layers of each stage: blocks dealt out evenly, the embedding before the first, the head after the last."""
    each, more = divmod(config.depth, num_stages)
    parts: list[list[int]] = []
    first = 1
    for stage in range(num_stages):
        count = each + (stage < more)
        parts.append(list(range(first, first + count)))
        first += count
    parts[0].insert(0, 0)
    parts[-1].append(config.num_layers - 1)
    return parts


def by_method(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["method"]: row for row in rows}


def shown(loss: float | None) -> str:
    """A loss in a table; None is that of a run that diverged."""
    return "diverged" if loss is None else f"{loss:.4f}"
