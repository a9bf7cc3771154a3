"""Case 13: dropout. `ps.plain_step` draws what a pipeline draws, so losses and gradients are equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences

D, M = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(D, D), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).relu())


class Net(nn.Module):
    """Draws in layers, and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = nn.functional.dropout(self.embed(x), 0.2, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(x if scale is None else x * scale)


class Slope(nn.Module):
    """Adds the gradient of what a layer gives to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(D, D), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.linear(x)
        (slope,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        return self.dropout(y + slope)


class SlopeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Slope(), Slope(), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_traced_model_that_takes_gradients_in_its_forward_draws_the_same(ranks: int) -> None:
    """Without autograd its forward failed before it drew anything, so it was taken for one that does not draw."""
    torch.manual_seed(0)
    model = SlopeNet()
    plain, x, y = copy.deepcopy(model), torch.randn(8, D), torch.randn(8, 1)
    with ps.Pipeline(model, ps.build("1f1b", ranks, M), loss_fn=nn.MSELoss(), seed=3) as pipe:
        assert pipe.verify(x, y).holds
        for step in (1, 2):
            loss = pipe.step(x, y, update=False).loss
            assert torch.equal(
                loss, ps.plain_step(plain, x, y, loss_fn=nn.MSELoss(), num_microbatches=M, seed=3, step=step)
            )
        found, want = ({n: p.grad for n, p in each.named_parameters()} for each in (model, plain))
        assert not differences(want, found)


def row() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), *(Block() for _ in range(5)), nn.Linear(D, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {"own forward": Net, "sequential": row}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_plain_step_draws_what_a_pipeline_draws(name: str, ranks: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain, x, y = copy.deepcopy(model), torch.randn(10, D), torch.randn(10, 1)
    inputs: Any = {"x": x, "scale": torch.rand(10, 1)} if name == "own forward" else x
    with ps.Pipeline(model, ps.build(schedule, ranks, M), loss_fn=nn.MSELoss(), seed=7) as pipe:
        for step in (1, 2):
            loss = pipe.step(inputs, y, update=False).loss
            want = ps.plain_step(plain, inputs, y, loss_fn=nn.MSELoss(), num_microbatches=M, seed=7, step=step)
            assert torch.equal(loss, want)
            assert not differences(gradients_of(plain), gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_plain_step_of_stages_and_of_a_split_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(10, D), torch.randn(10, 1)
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    options = {"loss_fn": nn.MSELoss(), "num_microbatches": M}
    loss = ps.plain_step(whole, x, y, **options)
    assert torch.equal(loss, ps.plain_step(ps.split(cut, 3), x, y, **options))
    assert torch.equal(loss, ps.plain_step(list(ps.split(model, 2)), x, y, **options))
    assert not differences(gradients_of(whole), gradients_of(cut))
    assert not differences(gradients_of(whole), gradients_of(model))


def test_a_plain_step_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(3)
    model, x, y = Net(), torch.ones(8, D), torch.ones(8, 1)
    before = torch.get_rng_state()
    ps.plain_step(model, x, y, loss_fn=nn.MSELoss(), num_microbatches=2)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_can_not_be_traced_draws_alike_in_one_stage() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) if x.sum() > 0 else self.block(-x)

    torch.manual_seed(0)
    model = Branches()
    plain, x, y = copy.deepcopy(model), torch.randn(8, D), torch.randn(8, D)
    with ps.Pipeline(model, ps.build("1f1b", 1, M), loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(x, y, update=False).loss
    assert torch.equal(loss, ps.plain_step(plain, x, y, loss_fn=nn.MSELoss(), num_microbatches=M))
    assert not differences(gradients_of(plain), gradients_of(model))
