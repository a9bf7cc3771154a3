"""Dataclasses, named tuples and dicts of a class of their own travel between stages, and train as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

import penstock as ps
from penstock.runtime.tensors.pytree import flatten, unflatten

D, M = 4, 4


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: float
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.x))


@dataclass
class Hidden:
    x: Tensor
    rest: Any = None


class Pair(NamedTuple):
    x: Tensor
    scale: float


class Attributes(dict[str, Any]):
    """Its items are its attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@dataclass
class Output(ModelOutput):
    x: Tensor | None = None
    scale: float | None = None


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "frozen dataclass": lambda x: Frozen(x, 2.0),
    "dataclass": lambda x: Hidden(x, {"a": (x, None)}),
    "named tuple": lambda x: Pair(x, 2.0),
    "dict with attributes": lambda x: Attributes(x=x, scale=2.0),
    "output of a model of transformers": lambda x: Output(x=x),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_taken_apart_and_put_together(kind: str) -> None:
    value = KINDS[kind](torch.ones(3))
    leaves, skeleton = flatten(value)
    again = unflatten([2 * leaf for leaf in leaves], skeleton)
    assert type(again) is type(value)
    assert torch.equal(again.x, torch.full((3,), 2.0))
    assert getattr(again, "size", 3) == 3


class Block(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(D, D), make

    def forward(self, value: Any) -> Any:
        return self.make(torch.tanh(self.linear(getattr(value, "x", value))))


class Net(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(make) for _ in range(4)), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Any = x
        for block in self.blocks:
            value = block(value)
        return self.head(value.x)


@pytest.mark.parametrize(  # a stage of a list is called with what a tuple holds, one by one
    ("kind", "form"), [*((kind, "traced") for kind in KINDS), ("frozen dataclass", "list"), ("dataclass", "list")]
)
def test_it_travels_between_stages(kind: str, form: str) -> None:
    torch.manual_seed(0)
    model: Any = Net(KINDS[kind])
    if form == "list":
        last = nn.Sequential(Block(lambda x: x), nn.Linear(D, 1))
        model = [Block(KINDS[kind]), last]
    plain, x, y = copy.deepcopy(model), torch.randn(8, D), torch.randn(8, 1)
    with ps.Pipeline(model, ps.build("zb-h1", 2, M), loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(x, y, update=False).loss
        assert pipe.verify(x, y).holds
        named = [p.grad for _, p in pipe.named_parameters()]
    assert torch.equal(loss, ps.plain_step(plain, x, y, loss_fn=nn.MSELoss(), num_microbatches=M))
    parts = [plain] if isinstance(plain, nn.Module) else plain
    assert all(torch.equal(a, p.grad) for a, p in zip(named, (p for m in parts for p in m.parameters()), strict=True))


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(x))


def summed(output: CausalLMOutput, labels: Tensor) -> Tensor:
    assert output.logits is not None
    return nn.functional.cross_entropy(output.logits, labels, reduction="sum")


def test_bug_the_loss_of_a_model_of_transformers_was_not_checked() -> None:
    model, x, labels = nn.Sequential(nn.Linear(D, D), Logits()), torch.randn(8, D), torch.randint(3, (8,))
    with ps.Pipeline(model, ps.build("1f1b", 2, M), loss_fn=summed) as pipe:
        (output, *_) = pipe.predict(x)
        assert type(output) is CausalLMOutput
        assert output.attentions is None
        with pytest.raises(ps.runtime.RuntimeFailure, match="It looks like a sum"):
            pipe.step(x, labels)


def test_a_dict_of_a_class_that_is_not_here_is_a_plain_one() -> None:
    leaves, (kind, inside) = flatten(Attributes(x=torch.ones(2)))
    assert type(unflatten(leaves, [kind.replace("Attributes", "Unknown"), inside])) is dict
