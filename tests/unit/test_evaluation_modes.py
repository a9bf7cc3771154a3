"""Modules that do more than note their mode when they are put into evaluation mode and back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences, plain_evaluate, plain_step
from runtime_cases import batches

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()


class Adapted(nn.Linear):
    """Has an adapter, as loralib has it: evaluation mode adds it to the weight, training mode takes it out again."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.down, self.up = (nn.Parameter(torch.randn(n)) for n in ((2, 8), (8, 2)))
        self.weight.requires_grad_(False)
        self.is_merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode is self.is_merged:
            with torch.no_grad():
                self.weight += self.up @ self.down * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.is_merged else y + x @ self.down.T @ self.up.T


class KeepsDropout(nn.Module):
    """Goes on dropping out in evaluation mode, which the model around its layers sees to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def train(self, mode: bool = True) -> KeepsDropout:
        super().train(mode)
        self.drop.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(self.first(x)))
        return y


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 2), ("zb-h1", 4), ("chimera", 2)])
def test_adapters_stayed_in_their_weights_after_an_evaluation(name: str, ranks: int) -> None:
    """Modules were marked as training again, and their own `train` was not called: adapters trained no more."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted(), Adapted(), Adapted())
    plain = copy.deepcopy(model)
    schedule = ps.build(name, ranks, 4)
    with ps.Pipeline(model, schedule, loss_fn=MSE) as pipe:
        for step, (x, y) in enumerate(batches(2, 8), 1):
            want = plain_step(plain, x, y, 4, MSE, step=step)
            assert torch.equal(pipe.step(x, y, update=False).loss, want)
            assert torch.equal(pipe.evaluate(x, y).loss, _evaluated(plain, x, y))
            assert torch.equal(torch.cat(pipe.predict(x)), _predicted(plain, x))
            assert not any(layer.is_merged for layer in model if isinstance(layer, Adapted))
    gradients = [{n: p.grad for n, p in each.named_parameters()} for each in (plain, model)]
    if len(schedule.placement.pipelines) == 1:
        assert differences(*gradients) == []
    assert all(gradients[1][f"{n}.down"] is not None for n in (0, 2, 3, 4))


def _evaluated(plain: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    plain.eval()
    loss = plain_evaluate(plain, x, y, 4, MSE)
    plain.train()
    return loss


def _predicted(plain: nn.Sequential, x: Tensor) -> Tensor:
    plain.eval()
    with torch.no_grad():
        output = torch.cat([plain(part) for part in x.tensor_split(4)])
    plain.train()
    return output


def test_a_model_whose_own_train_keeps_a_layer_in_training_mode() -> None:
    """Only the layers were put into evaluation mode, and the model around them was not asked."""
    torch.manual_seed(0)
    model = KeepsDropout()
    model.first.eval()
    x = torch.randn(8, 8)
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE) as pipe:
        first, second = (torch.cat(pipe.predict(x)) for _ in range(2))
    assert not torch.equal(first, second)
    assert [module.training for module in model.modules()] == [True, False, True, True]
