"""The only stage of a model that draws nothing is not traced, so no cache of the user keeps a stand-in."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import penstock as ps


@functools.lru_cache
def rates(num: int) -> Tensor:
    return torch.arange(num) / 10.0


CACHE: dict[str, Tensor] = {}


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if "t" not in CACHE:
            CACHE["t"] = torch.arange(8.0).to(x)
        for block in self.blocks:
            x = block(x) + rates(8) + CACHE["t"]
        return self.head(x)


def test_one_stage_trains_with_tables_in_caches() -> None:
    torch.manual_seed(0)
    model, x, y = Rotary(), torch.randn(8, 8), torch.randn(8, 1)
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(x, y, update=False).loss
    want = sum(nn.MSELoss()(plain(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True))
    assert torch.equal(loss, want.detach())
    assert type(CACHE["t"]) is Tensor


class Force(nn.Module):
    """Returns the gradient of an energy by its input, and draws."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.energy, self.dropout = nn.Linear(8, 1), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(self.dropout(x)).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_one_stage_trains_a_forward_that_asks_for_a_gradient(rate: float) -> None:
    torch.manual_seed(0)
    model, x, y = Force(rate), torch.randn(8, 8), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(x, y, update=False).loss
    assert torch.equal(loss, ps.plain_step(plain, x, y, loss_fn=nn.MSELoss(), num_microbatches=4))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class CallsBackward(nn.Module):
    """A layer that calls backward itself, so a forward that runs once more would add its gradient twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.inner(x).square().mean().backward()
        return self.head(x)


def test_one_stage_adds_a_gradient_of_its_own_backward_once() -> None:
    torch.manual_seed(0)
    model, x, y = CallsBackward(), torch.randn(8, 8), torch.randn(8, 1)
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, ps.build("1f1b", 1, 2), loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, y, update=False)
    for part in x.chunk(2):
        plain(part)
    assert torch.equal(model.inner.weight.grad, plain.inner.weight.grad)
