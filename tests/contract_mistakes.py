"""Forty mistakes, each of which breaks one sentence of the contract, and each as small as it can be.

sentence, made = MISTAKES["counter"]
pipe, inputs, targets = made(2)          a pipeline of two ranks, and the batch on which `pipe.verify` must find it
"""

from __future__ import annotations

import decimal
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import penstock as ps
from waiting import PATIENCE

Made = tuple[ps.Pipeline, Any, Any]
MISTAKES: dict[str, tuple[int, Callable[[int], Made]]] = {}
D, B, M = 6, 10, 4
"""Width, samples and microbatches: the last two of these are smaller than the others."""
MSE = nn.MSELoss()


def mistake(sentence: int) -> Callable[[Callable[[int], Made]], Callable[[int], Made]]:
    def add(function: Callable[[int], Made]) -> Callable[[int], Made]:
        MISTAKES[function.__name__] = sentence, function
        return function

    return add


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(B, D, generator=draw), torch.randn(B, D, generator=draw)


def row(*first: nn.Module, ranks: int, last: nn.Module | None = None) -> nn.Sequential:
    """Layers, of which the given ones are in the first stage or at the end."""
    layers = [nn.Linear(D, D), *first, *(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2 * ranks))]
    return nn.Sequential(*layers, *([] if last is None else [last]))


def piped(model: Any, ranks: int, loss_fn: Any = MSE, schedule: str = "1f1b", **options: Any) -> ps.Pipeline:
    stages = len(model) if isinstance(model, list) else ranks
    assert stages == ranks
    return ps.Pipeline(model, ps.build(schedule, ranks, M), loss_fn=loss_fn, timeout=PATIENCE, **options)


class Does(nn.Module):
    """A layer with a weight, whose forward is a function of itself and its input."""

    def __init__(self, forward: Callable[[Any, Any], Any], **held: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self._forward = forward
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                self.__dict__[name] = value  # where no module registers it

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


# Sentence 1: what a forward computes depends on inputs, parameters, buffers and torch's generator alone.


@mistake(1)
def counter(ranks: int) -> Made:
    count = itertools.count()
    return piped(row(Does(lambda s, x: x * s.weight * (1 + 0.1 * next(count))), ranks=ranks), ranks), *batch()


@mistake(1)
def random_of_python(ranks: int) -> Made:
    return piped(row(Does(lambda s, x: x * s.weight + random.random()), ranks=ranks), ranks), *batch()


@mistake(1)
def random_of_numpy(ranks: int) -> Made:
    noise = np.random.default_rng(0)
    layer = Does(lambda s, x: x * s.weight + torch.as_tensor(noise.normal(size=x.shape), dtype=x.dtype))
    return piped(row(layer, ranks=ranks), ranks), *batch()


@mistake(1)
def generator_of_its_own(ranks: int) -> Made:
    own = torch.Generator().manual_seed(0)
    layer = Does(lambda s, x: x * s.weight + torch.rand(x.shape, generator=own))
    return piped(row(layer, ranks=ranks), ranks), *batch()


@mistake(1)
def the_clock(ranks: int) -> Made:
    return piped(row(Does(lambda s, x: x * s.weight * (time.perf_counter() % 1)), ranks=ranks), ranks), *batch()


@mistake(1)
def growing_list(ranks: int) -> Made:
    seen: list[float] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        seen.append(1.0)
        return x * self.weight / len(seen)

    return piped(row(Does(forward), ranks=ranks), ranks), *batch()


# Sentence 2: nothing that a backward needs is changed in place; weights are changed by the optimizer.


@mistake(2)
def buffer_changed_through_data(ranks: int) -> Made:
    def forward(self: Any, x: Tensor) -> Tensor:
        result = x * self.weight * self.scale
        self.scale.data.mul_(0.9)
        return result

    return piped(row(Does(forward, scale=torch.ones(D)), ranks=ranks), ranks), *batch()


@mistake(2)
def buffer_changed_in_place(ranks: int) -> Made:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.scale.add_(0.1)
        return x * self.weight * self.scale

    return piped(row(Does(forward, scale=torch.ones(D)), ranks=ranks), ranks), *batch()


@mistake(2)
def weight_decays_in_forward(ranks: int) -> Made:
    def forward(self: Any, x: Tensor) -> Tensor:
        result = x * self.weight
        self.weight.data.mul_(0.99)
        return result

    return piped(row(Does(forward), ranks=ranks), ranks), *batch()


@mistake(2)
def hook_steps(ranks: int) -> Made:
    model = row(ranks=ranks)
    weight = model[0].weight

    def step(parameter: Tensor) -> None:
        parameter.data.sub_(0.1 * parameter.grad)

    weight.register_post_accumulate_grad_hook(step)
    return piped(model, ranks), *batch()


class _Kept(torch.autograd.Function):
    """Multiplies, and keeps its input where the next forward puts its own."""

    kept: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _Kept.kept = x.detach()
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        kept = _Kept.kept[: len(gradient)]
        return gradient * weight, (gradient[: len(kept)] * kept).sum(0)


@mistake(2)
def function_keeps_its_input_in_one_place(ranks: int) -> Made:
    return piped(row(Does(lambda s, x: _Kept.apply(x, s.weight)), ranks=ranks), ranks), *batch()


@mistake(2)
def tensor_hook_reads_the_last_forward(ranks: int) -> Made:
    last: dict[str, float] = {}

    def forward(self: Any, x: Tensor) -> Tensor:
        result = x * self.weight
        last["size"] = float(x.detach().abs().mean())
        result.register_hook(lambda gradient: gradient / last["size"])
        return result

    return piped(row(Does(forward), ranks=ranks), ranks), *batch()


@mistake(2)
def scratch_memory_is_used_again(ranks: int) -> Made:
    def forward(self: Any, x: Tensor) -> Tensor:
        scratch = self.scratch.data[: len(x)]
        scratch.copy_(x.detach())
        return x + self.weight * scratch

    return piped(row(Does(forward, scratch=torch.zeros(B, D)), ranks=ranks), ranks), *batch()


# Sentence 3: a traced model is traced once.


class Traced(nn.Module):
    """A model with a forward of its own, which multiplies by what a function gives."""

    def __init__(self, ranks: int, factor: Callable[[], float]) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2 * ranks))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.factor()
        for block in self.blocks:
            x = block(x)
        return x


@mistake(3)
def file_changes_after_the_cut(ranks: int) -> Made:
    path = Path(tempfile.mkdtemp(), "factor")
    path.write_text("1.0")
    x, y = batch()
    pipe = piped(Traced(ranks, lambda: float(path.read_text())), ranks)
    pipe.step(x, y, update=False)
    path.write_text("2.0")
    return pipe, x, y


@mistake(3)
def setting_of_a_library_changes_after_the_cut(ranks: int) -> Made:
    decimal.getcontext().prec = 28
    x, y = batch()
    pipe = piped(Traced(ranks, lambda: float(1 / decimal.Decimal(3))), ranks)
    pipe.step(x, y, update=False)
    decimal.getcontext().prec = 1
    return pipe, x, y


@mistake(3)
def attribute_changes_after_the_cut(ranks: int) -> Made:
    config = {"scale": 1.0}
    x, y = batch()
    pipe = piped(Traced(ranks, lambda: config["scale"]), ranks)
    pipe.step(x, y, update=False)
    config["scale"] = 2.0
    return pipe, x, y


class LeavesItsSize(nn.Module):
    """A layer that leaves the size of its output in an attribute, as mixtures of experts leave a loss of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(D, D), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.size = x.square().mean()
        return x


class ReadsSizes(Traced):
    """Adds to its output what its layers have left in attributes."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, lambda: 1.0)
        self.blocks = nn.ModuleList(LeavesItsSize() for _ in range(2 * ranks))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.size for block in self.blocks)


@mistake(3)
def attributes_of_layers_are_read(ranks: int) -> Made:
    return piped(ReadsSizes(ranks), ranks), *batch()


@mistake(3)
def clock_in_a_traced_forward(ranks: int) -> Made:
    return piped(Traced(ranks, lambda: time.perf_counter() % 1), ranks), *batch()


# Sentence 4: modules and parameters stay the same objects.


@mistake(4)
def layer_replaced(ranks: int) -> Made:
    model = row(ranks=ranks)
    pipe = piped(model, ranks)
    model[0] = nn.Linear(D, D)
    model[-1] = nn.Linear(D, D)
    return pipe, *batch()


@mistake(4)
def layer_added(ranks: int) -> Made:
    model = row(ranks=ranks)
    pipe = piped(model, ranks)
    model.append(nn.Linear(D, D))
    return pipe, *batch()


@mistake(4)
def parameter_replaced(ranks: int) -> Made:
    model = row(ranks=ranks)
    pipe = piped(model, ranks)
    model[0].weight = nn.Parameter(torch.ones(D, D))
    return pipe, *batch()


@mistake(4)
def parameter_removed_and_given_again(ranks: int) -> Made:
    model = row(last=nn.Linear(D, D), ranks=ranks)
    pipe = piped(model, ranks)
    bias = model[-1].bias.detach()
    del model[-1].bias
    model[-1].bias = nn.Parameter(bias.clone())
    return pipe, *batch()


# Sentence 5: a stage uses its own parameters.


@mistake(5)
def parameter_in_a_list(ranks: int) -> Made:
    layer = Does(lambda s, x: x * s.weight + s.biases[0], biases=[nn.Parameter(torch.ones(D))])
    return piped(row(layer, ranks=ranks), ranks), *batch()


GLOBAL = nn.Parameter(torch.ones(D))


@mistake(5)
def global_parameter(ranks: int) -> Made:
    return piped(row(Does(lambda s, x: x * s.weight * GLOBAL), ranks=ranks), ranks), *batch()


@mistake(5)
def module_in_a_closure(ranks: int) -> Made:
    torch.manual_seed(1)
    hidden = nn.Linear(D, D)
    return piped(row(Does(lambda s, x: hidden(x) * s.weight), ranks=ranks), ranks), *batch()


@mistake(5)
def module_in_a_dict(ranks: int) -> Made:
    torch.manual_seed(1)
    layer = Does(lambda s, x: s.adapters["a"](x) * s.weight, adapters={"a": nn.Linear(D, D)})
    return piped(row(layer, ranks=ranks), ranks), *batch()


# Sentence 6: tensors, numbers, text, None, and containers of them travel between stages.


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Kind(Enum):
    ONE = 1


def between(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], ranks: int) -> Made:
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(D, D), Does(lambda s, x: pack(x * s.weight)))]
    stages += [Does(lambda s, v: pack(unpack(v) * s.weight)) for _ in range(ranks - 2)]
    stages.append(Does(lambda s, v: unpack(v) * s.weight))
    return piped(stages, ranks), *batch()


@mistake(6)
def an_object_travels(ranks: int) -> Made:
    return between(Box, lambda box: box.x, ranks)


@mistake(6)
def an_array_of_numpy_travels(ranks: int) -> Made:
    return between(lambda x: {"x": x, "n": np.ones(3)}, lambda v: v["x"], ranks)


@mistake(6)
def an_enum_travels(ranks: int) -> Made:
    return between(lambda x: (x, Kind.ONE), lambda v: v[0] if isinstance(v, tuple) else v, ranks)


@mistake(6)
def a_set_travels(ranks: int) -> Made:
    return between(lambda x: {"x": x, "names": {"a", "b"}}, lambda v: v["x"], ranks)


# Sentence 7: a loss is a mean over samples, or says what it is; samples do not see one another.


@mistake(7)
def loss_that_sums(ranks: int) -> Made:
    return piped(row(ranks=ranks), ranks, lambda out, target: (out - target).square().sum()), *batch()


@mistake(7)
def root_of_the_mean(ranks: int) -> Made:
    return piped(row(ranks=ranks), ranks, lambda out, target: (out - target).square().mean().sqrt()), *batch()


@mistake(7)
def largest_error(ranks: int) -> Made:
    return piped(row(ranks=ranks), ranks, lambda out, target: (out - target).abs().max()), *batch()


@mistake(7)
def padding_hidden_in_a_function(ranks: int) -> Made:
    x, _ = batch()
    target = torch.randint(0, D, (B,), generator=torch.Generator().manual_seed(2))
    target[:2] = -100
    loss = nn.CrossEntropyLoss()
    return piped(row(ranks=ranks), ranks, lambda out, labels: loss(out, labels)), x, target


@mistake(7)
def contrast_within_a_microbatch(ranks: int) -> Made:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out @ target.T, torch.arange(len(out)))

    return piped(row(ranks=ranks), ranks, loss), *batch()


@mistake(7)
def samples_are_centred(ranks: int) -> Made:
    return piped(row(Does(lambda s, x: (x - x.mean(0)) * s.weight), ranks=ranks), ranks), *batch()


@mistake(7)
def attention_over_samples(ranks: int) -> Made:
    layer = Does(lambda s, x: torch.softmax(x @ x.T, -1) @ x * s.weight)
    return piped(row(layer, ranks=ranks), ranks), *batch()


@mistake(7)
def samples_are_scaled_by_the_largest(ranks: int) -> Made:
    layer = Does(lambda s, x: x / x.abs().amax() * s.weight)
    return piped(row(layer, ranks=ranks), ranks), *batch()


class WithTable(nn.Module):
    """Adds to each sample the row of a table that its number asks for."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2 * ranks))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.embed(x) + table.mean(0)
        for block in self.blocks:
            x = block(x)
        return x


@mistake(7)
def table_cut_as_if_it_were_samples(ranks: int) -> Made:
    x, y = batch()
    return piped(WithTable(ranks), ranks), {"x": x, "table": y}, y


class Transposed(nn.Module):
    """Takes [T, B, D], and averages over T."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2 * ranks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x + x.mean(0, keepdim=True))
        return x


@mistake(7)
def samples_in_dimension_one(ranks: int) -> Made:
    x = torch.randn(B, 5, D, generator=torch.Generator().manual_seed(4))
    return piped(Transposed(ranks), ranks), x, torch.zeros(B, 5, D)
