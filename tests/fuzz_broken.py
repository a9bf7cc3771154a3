"""Programs that break one sentence of the contract, and whether `pipe.verify` finds the breach.

    program = draw_broken(17)    a program of the fuzzer that keeps the contract, with one breach put into it
    judge(program).kind          "found"; "missed"; "harmless": its step gives the plain loop's numbers all the same

A breach is a layer, a loss or something that a user does to the model. `BREACHES` has them by name, each with the
number of its sentence (docs/contract.md). A program is judged in one process.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import penstock as ps
from fuzz_blocks import Fork, InPlace, Join, OnFirst
from fuzz_cases import LOSSES, TOWERS, Case, Chain, D, as_module, batch_of, layers_of
from fuzz_verified import keeps_the_contract

SEEDS = 10
"""A program is drawn from the first of so many seeds whose case keeps the contract and has two stages or more."""

SAME = 1e-5
"""The relative difference of losses and gradients up to which a step is the plain loop's."""
ALIKE = 2e-3
"""The same for a breach of sentence 7, where the batch in one piece adds up in another order."""

LOG: list[float] = []
"""A list of the module, which one breach reads and appends to."""
SETTINGS = {"scale": 1.0}
"""A setting of the module, which one breach changes."""


@dataclass
class Parts:
    """A model while it is made, for a breach to change.

    Attributes:
        stages: the layers of each stage.
        rng: what a breach draws from.
        loss: the loss of a microbatch.
        forward: what the forward of a traced model does after its layers; None if the model is a list of stages.
        after: what the user does to the model once the pipeline is made.
    """

    stages: list[list[nn.Module]]
    rng: random.Random
    loss: Any
    forward: Callable[[Traced, Tensor], Tensor] | None = None
    after: Callable[[Any], None] = lambda model: None

    def insert(self, layer: nn.Module, stage: int | None = None) -> None:
        """Puts a layer at the end of a stage, at which a single tensor travels."""
        chosen = self.rng.randrange(len(self.stages)) if stage is None else stage
        self.stages[chosen].append(layer)


class Traced(nn.Module):
    """Has a forward of its own, which is traced: its layers, and then what a breach does."""

    def __init__(self, layers: list[nn.Module], then: Callable[[Traced, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale, self.is_doubled, self._then = 1.0, False, then

    def forward(self, value: Any) -> Any:
        for layer in self.layers:
            value = layer(value)
        return self._then(self, value)


class Does(nn.Module):
    """A layer that calls a function with itself and its input, and has a weight and a buffer."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(D))
        self.register_buffer("scale", torch.ones(D))
        self.calls, self.last, self.others, self._function = 0, None, [], function
        self.generator, self.scratch = torch.Generator().manual_seed(3), torch.zeros(0)

    def forward(self, value: Any) -> Any:
        return self._function(self, value)


@dataclass(frozen=True)
class Breach:
    """A way to break a sentence: its number, and what it does to a model."""

    sentence: int
    plant: Callable[[Parts], None]


BREACHES: dict[str, Breach] = {}
"""By name."""

Plant = Callable[[Parts], None]


def breach(sentence: int, name: str) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        BREACHES[name] = Breach(sentence, plant)
        return plant

    return keep


def layer(sentence: int, name: str, stage: int | None = None) -> Callable[[Callable[[Any, Any], Any]], Any]:
    """A breach by a layer that does this. stage: where it stands, if that matters."""

    def keep(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        BREACHES[name] = Breach(sentence, lambda parts: parts.insert(Does(function), stage))
        return function

    return keep


# Sentence 1: what a forward computes depends on its inputs, parameters, buffers and torch's generator alone.


@layer(1, "counts its calls")
def _counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.weight * (1 + 0.1 * self.calls)


@layer(1, "changes its ways after two calls")
def _changes(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return torch.tanh(x) * self.weight if self.calls > 2 else x * self.weight


@layer(1, "draws from Python's random")
def _python(self: Any, x: Tensor) -> Tensor:
    return x * self.weight * random.uniform(0.5, 1.5)


@layer(1, "draws from numpy")
def _numpy(self: Any, x: Tensor) -> Tensor:
    return x * self.weight * float(np.random.uniform(0.5, 1.5))


@layer(1, "draws from a generator of its own")
def _generator(self: Any, x: Tensor) -> Tensor:
    return x * self.weight * (torch.rand((), generator=self.generator) + 0.5)


@layer(1, "adds a mean of what it saw before")
def _remembers(self: Any, x: Tensor) -> Tensor:
    mean = 0.9 * (0.0 if self.last is None else self.last) + 0.1 * float(x.detach().mean())
    self.last = mean
    return x * self.weight + mean


@layer(1, "reads a list that its calls append to")
def _logs(self: Any, x: Tensor) -> Tensor:
    LOG.append(float(x.detach().mean()))
    return x * self.weight * (1 + 0.1 * len(LOG))


@layer(1, "changes with the clock")
def _clock(self: Any, x: Tensor) -> Tensor:
    return x * self.weight * (1 + (time.perf_counter_ns() % 1009) / 1009)


# Sentence 2: forwards of other microbatches run between a forward and its backward.


@layer(2, "halves the activation of its last call", stage=0)
def _halves(self: Any, x: Tensor) -> Tensor:
    if self.last is not None:
        self.last.data.mul_(0.5)
    self.last = torch.tanh(x * self.weight)
    return self.last * 1.0


@layer(2, "writes into a scratch tensor", stage=0)
def _scratch(self: Any, x: Tensor) -> Tensor:
    if self.scratch.shape != x.shape:
        self.scratch = torch.zeros_like(x, requires_grad=False)
    self.scratch.data.copy_(x.detach().cos())
    return x * self.weight * self.scratch


@layer(2, "writes into a scratch tensor, and torch sees it", stage=0)
def _seen_scratch(self: Any, x: Tensor) -> Tensor:
    if self.scratch.shape != x.shape:
        self.scratch = torch.zeros_like(x, requires_grad=False)
    self.scratch.copy_(x.detach().cos())
    return x * self.weight * self.scratch


@layer(2, "lets its weight decay", stage=0)
def _decays(self: Any, x: Tensor) -> Tensor:
    self.weight.data.mul_(0.9)
    return x * self.weight


@layer(2, "changes a buffer that its backward needs", stage=0)
def _buffer(self: Any, x: Tensor) -> Tensor:
    self.scale.data.add_(0.25)
    return x * self.weight * self.scale


@layer(2, "changes the input of its last call", stage=0)
def _input(self: Any, x: Tensor) -> Tensor:
    if self.last is not None:
        self.last.data.add_(0.5)
    self.last = x + 0.0
    return self.last * self.weight


# Sentence 3: a traced model is traced once.


def _scales(model: Traced, x: Tensor) -> Tensor:
    return x * model.scale


@breach(3, "an attribute of a traced model changes")
def _attribute(parts: Parts) -> None:
    parts.forward, parts.after = _scales, lambda model: setattr(model, "scale", 1.5)


@breach(3, "a flag of a traced model changes")
def _flag(parts: Parts) -> None:
    parts.forward = lambda model, x: x * 2 if model.is_doubled else x
    parts.after = lambda model: setattr(model, "is_doubled", True)


@breach(3, "a setting that a traced forward reads changes")
def _setting(parts: Parts) -> None:
    parts.forward = lambda model, x: x * SETTINGS["scale"]
    parts.after = lambda model: SETTINGS.update(scale=0.5)


@breach(3, "a layer is called once less")
def _shorter(parts: Parts) -> None:
    parts.stages[-1].append(nn.Linear(D, D))
    parts.stages[-1].append(nn.Linear(D, D))
    parts.forward, parts.after = _scales, lambda model: delattr(model.layers, str(len(model.layers) - 1))


@breach(3, "a traced forward asks for the exact type")
def _type(parts: Parts) -> None:
    parts.forward = lambda model, x: x * 2 if type(x) is Tensor else x


@breach(3, "a layer leaves its output in an attribute")
def _leaves(parts: Parts) -> None:
    def leave(self: Any, x: Tensor) -> Tensor:
        self.left = torch.tanh(x * self.weight)
        return x

    parts.insert(Does(leave), 0)
    number = len(parts.stages[0]) - 1
    parts.forward = lambda model, x: x + getattr(model.layers[number], "left", torch.zeros(()))


# Sentence 4: modules and parameters stay the same objects.


def _layers_with_weights(model: Any) -> list[tuple[Any, Any, nn.Module]]:
    """(what holds it, its place there, layer) of the last layer, which every program has."""
    holder = model if isinstance(model, nn.Sequential) else model[-1].layers
    return [(holder, len(holder) - 1, holder[len(holder) - 1])]


def _last(parts: Parts) -> None:
    parts.stages[-1].append(nn.Linear(D, D))


@breach(4, "a weight is replaced")
def _weight(parts: Parts) -> None:
    def replace(model: Any) -> None:
        for _, _, found in _layers_with_weights(model):
            found.weight = nn.Parameter(torch.eye(D))

    _last(parts)
    parts.after = replace


@breach(4, "a layer is replaced")
def _layer(parts: Parts) -> None:
    def replace(model: Any) -> None:
        for holder, place, _ in _layers_with_weights(model):
            holder[place] = nn.Linear(D, D)

    _last(parts)
    parts.after = replace


@breach(4, "a layer is taken out")
def _out(parts: Parts) -> None:
    def replace(model: Any) -> None:
        for holder, place, _ in _layers_with_weights(model):
            holder[place] = nn.Identity()

    _last(parts)
    parts.after = replace


@breach(4, "a weight gets a parametrization")
def _parametrized(parts: Parts) -> None:
    def replace(model: Any) -> None:
        for _, _, found in _layers_with_weights(model):
            nn.utils.parametrizations.weight_norm(found)

    _last(parts)
    parts.after = replace


@breach(4, "a parameter is added")
def _added(parts: Parts) -> None:
    def add(model: Any) -> None:
        for _, _, found in _layers_with_weights(model):
            found.added = nn.Parameter(torch.ones(D))
            found.register_forward_hook(lambda module, args, output: output * module.added * 2)

    _last(parts)
    parts.after = add


# Sentence 5: a stage uses its own parameters and buffers.


@breach(5, "a layer of another stage in a list")
def _listed(parts: Parts) -> None:
    first, second = nn.Linear(D, D), Does(lambda self, x: x @ self.others[0].weight * self.weight)
    second.others.append(first)
    parts.insert(first, 0)
    parts.insert(second, len(parts.stages) - 1)


@breach(5, "a weight from outside")
def _outside(parts: Parts) -> None:
    weight = nn.Parameter(torch.randn(D, D))
    parts.insert(Does(lambda self, x: torch.tanh(x @ weight) * self.weight))


@breach(5, "a buffer that two stages have, and one changes")
def _shared_buffer(parts: Parts) -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        self.scale.add_(float(x.detach().mean()))
        return x * self.weight

    writer, reader = Does(change), Does(lambda self, x: x * self.weight * (1 + self.scale))
    reader.scale = writer.scale
    parts.insert(writer, 0)
    parts.insert(reader, len(parts.stages) - 1)


# Sentence 6: tensors, numbers, text, None, and tuples, lists and dicts of them travel between stages.


class Bag:
    """An object of a user's class."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _between(parts: Parts, pack: Callable[[Any, Tensor], Any], unpack: Callable[[Any, Any], Tensor]) -> None:
    """One stage ends in what `pack` makes, and the next begins with what takes it."""
    stage = parts.rng.randrange(len(parts.stages) - 1)
    parts.stages[stage].append(Does(pack))
    parts.stages[stage + 1].insert(0, Does(unpack))


@breach(6, "a set travels")
def _set(parts: Parts) -> None:
    _between(parts, lambda self, x: {x * self.weight}, lambda self, values: next(iter(values)) * self.weight)


@breach(6, "an object of a class travels")
def _object(parts: Parts) -> None:
    _between(parts, lambda self, x: (x, Bag(x * self.weight)), lambda self, x, bag=None: x[0] + x[1].value)


@breach(6, "an iterator travels")
def _iterator(parts: Parts) -> None:
    _between(parts, lambda self, x: iter([x * self.weight]), lambda self, values: next(values) * self.weight)


@breach(6, "a view is changed in place in the next stage")
def _view(parts: Parts) -> None:
    stage = parts.rng.randrange(len(parts.stages) - 1)
    parts.stages[stage].append(Fork(D, parts.rng.choice(["a view", "a transposed view", "a dict with a view"])))
    parts.stages[stage + 1][:0] = [OnFirst(InPlace()), Join()]


@breach(6, "a later stage fills a list of an earlier one")
def _filled(parts: Parts) -> None:
    notes: list[float] = [0.0]

    def pack(self: Any, x: Tensor) -> Any:
        self.last = notes
        return x * self.weight * (1 + notes[-1]), notes

    def unpack(self: Any, value: Any) -> Tensor:
        x, found = value
        found.append(float(x.detach().mean()))
        return x * self.weight

    _between(parts, pack, unpack)


# Sentence 7: a loss is a mean over samples, or says what it is; samples do not see one another.


@breach(7, "a loss that sums")
def _sum(parts: Parts) -> None:
    parts.loss = lambda output, target: (output - target).square().sum()


@breach(7, "a root of a mean")
def _root(parts: Parts) -> None:
    parts.loss = lambda output, target: (output - target).square().mean().sqrt()


@breach(7, "a mean over those that are not padding")
def _padding(parts: Parts) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        counted = target > 0.5
        return ((output - target).square() * counted).sum() / counted.sum().clamp(min=1)

    parts.loss = loss


@breach(7, "the largest error")
def _largest(parts: Parts) -> None:
    parts.loss = lambda output, target: (output - target).square().amax()


@breach(7, "samples in contrast with one another")
def _contrast(parts: Parts) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        scores = output.flatten(1) @ target.flatten(1).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    parts.loss = loss


@layer(7, "centred over samples")
def _centred(self: Any, x: Tensor) -> Tensor:
    return (x - x.mean(0)) * self.weight


@layer(7, "a softmax over samples")
def _softmax(self: Any, x: Tensor) -> Tensor:
    return torch.softmax(x, 0) * self.weight


@layer(7, "normed over the batch")
def _normed(self: Any, x: Tensor) -> Tensor:
    return x / (x.std() + 0.1) * self.weight


@layer(7, "a sum over the samples before")
def _before(self: Any, x: Tensor) -> Tensor:
    return x.cumsum(0) * self.weight


@breach(7, "samples are taken for time")
def _time(parts: Parts) -> None:
    gru = nn.GRU(D, D)
    inner = Does(lambda self, x: x + self.gru(x)[0])
    inner.gru = gru
    parts.insert(inner)


# Programs.


@dataclass(frozen=True)
class Broken:
    """A program with a breach.

    Attributes:
        case: what it was made of, whose form does not matter. breach: a name of `BREACHES`. seed: of what it draws.
    """

    case: Case
    breach: str
    seed: int

    @property
    def sentence(self) -> int:
        return BREACHES[self.breach].sentence


@dataclass(frozen=True)
class Judged:
    """How a program ended.

    Attributes:
        kind: "found", "missed" or "harmless". said: what verify or another error said, or what differs.
        sentence: the one that verify named.
    """

    kind: str
    said: str = ""
    sentence: int | None = field(default=None)


def draw_broken(number: int, first: int = 0) -> Broken:
    """The program of a number: sentences take turns, and the breach and all else are drawn."""
    sentence = 1 + number % 7
    seed = first + SEEDS * number
    rng = random.Random(seed)
    name = rng.choice([name for name, one in BREACHES.items() if one.sentence == sentence])
    cases = (keeps_the_contract(each) for each in range(seed, seed + 100 * SEEDS))
    case = next(case for case in cases if case is not None and _takes_a_breach(case))
    return Broken(case, name, seed)


def _takes_a_breach(case: Case) -> bool:
    """Whether two stages at least, of single tensors between layers, run with several microbatches under way."""
    if case.schedule == TOWERS or any(name.startswith(("fork", "on first", "again")) for name in case.blocks):
        return False
    return case.build().num_stages > 1 and case.num_microbatches > 1 and len(case.blocks) >= case.build().num_stages


def _made(program: Broken) -> tuple[Parts, Any]:
    """What a breach made of the layers, and the model."""
    layers, num_stages = layers_of(program.case), program.case.build().num_stages
    size, more = divmod(len(layers), num_stages)
    ends = [0]
    for stage in range(num_stages):
        ends.append(ends[-1] + size + (stage < more))
    rng = random.Random(program.seed)
    parts = Parts([layers[a:b] for a, b in pairwise(ends)], rng, LOSSES[program.case.loss]())
    LOG.clear()
    SETTINGS.update(scale=1.0)
    torch.manual_seed(program.seed)
    BREACHES[program.breach].plant(parts)
    if parts.forward is not None:
        model: Any = Traced([each for stage in parts.stages for each in stage], parts.forward)
        return parts, model
    model = [Chain(stage) for stage in parts.stages]
    if program.sentence in (1, 2, 4, 7) and rng.random() < 0.5:
        model = nn.Sequential(*(each for stage in parts.stages for each in stage))
    return parts, model


def judge(program: Broken) -> Judged:
    """Whether `pipe.verify`, or an error of ours before it, finds the breach."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts, model = _made(program)
        batch = batch_of(program.case, 1)
        pipe = None
        try:
            pipe = _pipeline(program, model, parts)
            parts.after(model)
            pipe.verify(*batch)
            return _compared(program, pipe, batch)
        except Exception as error:
            if not type(error).__module__.startswith("penstock"):
                return _without_verify(program, error)
            verification = getattr(error, "verification", None)
            named = [each.sentence for each in verification.comparisons if each.sentence] if verification else []
            return Judged("found", str(error), named[0] if named else getattr(error, "sentence", None))
        finally:
            if pipe is not None:
                pipe.close()


def _without_verify(program: Broken, error: Exception) -> Judged:
    """Of an error that is not ours: whether the plain loop itself fails."""
    try:
        _plain_loss(program, *_made(program), batch_of(program.case, 1))
    except RuntimeError:
        return Judged("harmless", "the plain loop itself fails")
    return Judged("missed", f"{type(error).__name__}: {error}")


def _plain_loss(program: Broken, parts: Parts, model: Any, batch: tuple[Any, Any]) -> Tensor:
    """The loss of the plain loop, which leaves gradients: of the batch in one piece for sentence 7."""
    case = program.case
    return ps.plain_step(
        model,
        *batch,
        loss_fn=parts.loss,
        num_microbatches=1 if program.sentence == 7 else case.num_microbatches,
        autocast=torch.bfloat16 if case.autocast else None,
    )


def _pipeline(program: Broken, model: Any, parts: Parts) -> ps.Pipeline:
    case = program.case
    return ps.Pipeline(
        model,
        case.build(),
        loss_fn=parts.loss,
        dispatch=case.dispatch,
        precision=ps.PrecisionOptions(autocast=torch.bfloat16 if case.autocast else None),
    )


def _compared(program: Broken, pipe: ps.Pipeline, batch: tuple[Any, Any]) -> Judged:
    """A step beside the plain loop: whether what verify let pass does any harm."""
    parts, model = _made(program)
    parts.after(model)
    sevenths = program.sentence == 7
    with suppress(RuntimeError):
        want = _plain_loss(program, parts, model, batch)
        SETTINGS.update(scale=0.5 if "setting" in program.breach else 1.0)
        LOG.clear()
        try:
            got = pipe.step(*batch, update=False).loss
        except Exception as error:
            return Judged("missed", f"its step fails: {type(error).__name__}: {error}")
        theirs = {name: p.grad for name, p in as_module(model).named_parameters()}
        mine = {name: p.grad for name, p in pipe.named_parameters()}
        far = [name for name in mine if name in theirs and _differ(mine[name], theirs[name], sevenths)]
        if _differ(got, want, sevenths) or far:
            return Judged("missed", f"loss {float(got):g}, want {float(want):g}; other gradients: {far[:3]}")
        return Judged("harmless")
    return Judged("harmless", "the plain loop itself fails")


def _differ(mine: Tensor | None, theirs: Tensor | None, loosely: bool) -> bool:
    if mine is None or theirs is None:
        return mine is not theirs
    scale = max(float(theirs.abs().max()), 1e-6) if theirs.numel() else 1.0
    return not float((mine - theirs).abs().max() if theirs.numel() else 0.0) <= (ALIKE if loosely else SAME) * scale
