"""What a model draws in evaluation: other numbers in each call, and those of the plain loop with the same seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.runtime.tensors.rng import mix
from plain_loop import call
from runtime_cases import batches, lin

pytestmark = pytest.mark.unit


class AlwaysDrops(nn.Module):
    """Dropout in evaluation mode too, as Monte Carlo dropout has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output + torch.randn_like(output), target)


def pipeline(name: str, ranks: int, **options: Any) -> tuple[nn.Sequential, ps.Pipeline]:
    torch.manual_seed(3)
    model = nn.Sequential(lin(), AlwaysDrops(), lin(), AlwaysDrops(), lin())
    return model, ps.Pipeline(model, ps.build(name, ranks, 4), loss_fn=noisy, seed=7, **options)


@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 1), ("1f1b", 2), ("zb-h1", 4), ("chimera", 2)])
def test_every_evaluation_drew_the_same_numbers(name: str, ranks: int) -> None:
    model, pipe = pipeline(name, ranks)
    (x, y), *_ = batches(4, 8)
    before = torch.get_rng_state()
    found = [torch.cat(pipe.predict(x)) for _ in range(3)]
    losses = [pipe.evaluate(x, y).loss for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    for k, output in enumerate(found, 1):
        with torch.no_grad(), torch.random.fork_rng():
            want = [call(model, x_m, mix(mix(7, 0, k), m)) for m, x_m in enumerate(x.tensor_split(4))]
        assert torch.equal(output, torch.cat(want))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(losses[0], losses[1])


def test_evaluations_change_nothing_of_a_step_and_come_again_after_it(tmp_path: Any) -> None:
    (x, y), *_ = batches(4, 8)
    model, pipe = pipeline("1f1b", 2, optimizer=torch.optim.SGD)
    pipe.step(x, y)
    pipe.save(tmp_path)
    first, second = (pipe.evaluate(x, y).loss for _ in range(2))
    loss = pipe.step(x, y).loss
    _, again = pipeline("1f1b", 2, optimizer=torch.optim.SGD)
    again.evaluate(x, y)
    again.load(tmp_path)
    assert torch.equal(again.evaluate(x, y).loss, first)
    assert torch.equal(again.evaluate(x, y).loss, second)
    assert torch.equal(again.step(x, y).loss, loss)
    copy.deepcopy(model)  # a pipeline leaves nothing in a model that could not be copied


class Dropping(nn.Module):
    """Its forward is traced, and draws at two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def fails(pipe: ps.Pipeline, drops: list[nn.Dropout]) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        pipe.step(torch.randn(8, 3), torch.randn(8, 4))


def without_dropout(pipe: ps.Pipeline, drops: list[nn.Dropout]) -> None:
    for drop in drops:
        drop.p = 0.0
    pipe.step(torch.ones(8, 4), torch.ones(8, 4))
    for drop in drops:
        drop.p = 0.5


def frozen(pipe: ps.Pipeline, drops: list[nn.Dropout]) -> None:
    for drop in drops:
        drop.eval()
    pipe.step(torch.ones(8, 4), torch.ones(8, 4))
    for drop in drops:
        drop.train()


@pytest.mark.parametrize("first", [fails, without_dropout, frozen])
def test_a_model_in_one_stage_draws_as_in_two_after_a_step_that_drew_nothing(
    first: Callable[[ps.Pipeline, list[nn.Dropout]], None],
) -> None:
    losses = []
    for num_stages in (1, 2):
        torch.manual_seed(0)
        model = Dropping()
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        with ps.Pipeline(model, ps.build("1f1b", num_stages, 4), loss_fn=nn.MSELoss()) as pipe:
            first(pipe, [module for module in model.modules() if isinstance(module, nn.Dropout)])
            losses.append(pipe.step(x, y).losses)
    assert torch.equal(*losses)
