"""Dataclasses and named tuples travel between stages, and train as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

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


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "frozen dataclass": lambda x: Frozen(x, 2.0),
    "dataclass": lambda x: Hidden(x, {"a": (x, None)}),
    "named tuple": lambda x: Pair(x, 2.0),
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
