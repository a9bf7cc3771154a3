"""Row 2: a loss that sums, without `adds_up`, gave 14.5 where the batch has 57.9."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.errors import RuntimeFailure


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def model_and_batch() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(8, 4), torch.randn(8, 4)


def test_a_sum_is_told_in_the_first_step_and_not_trained() -> None:
    model, x, y = model_and_batch()
    with ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=squares, optimizer=torch.optim.SGD) as pipe:
        before = [p.detach().clone() for p in pipe.parameters()]
        with pytest.raises(RuntimeFailure, match=r"It looks like a sum.*loss_fn.adds_up = True if it sums"):
            pipe.step(x, y)
        assert all(map(torch.equal, before, pipe.parameters()))


def test_a_sum_that_says_so_is_the_batchs() -> None:
    model, x, y = model_and_batch()

    def said(output: Tensor, target: Tensor) -> Tensor:
        return squares(output, target)

    loss_fn: Any = said
    loss_fn.adds_up = True
    with ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=loss_fn) as pipe:
        found = pipe.step(x, y, update=False)
        assert torch.allclose(found.loss, squares(nn.Sequential(*model)(x), y))
        assert torch.allclose(pipe.evaluate(x, y).loss, found.loss)


class GivesLoss(nn.Linear):
    """The last layer of a model that returns its loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x).square().sum() / 8}


def test_shares_without_targets_are_added_up_too() -> None:
    """They were weighed by samples: the loss and its gradients were a quarter of the batch's."""
    torch.manual_seed(0)
    model, x = [nn.Linear(4, 4), GivesLoss(4, 4)], torch.randn(8, 4)
    want = nn.Sequential(*model)(x)["loss"]
    wanted = torch.autograd.grad(want, list(nn.ModuleList(model).parameters()))

    def of_model(output: dict[str, Tensor], _: None) -> Tensor:
        return output["loss"]

    loss_fn: Any = of_model
    loss_fn.adds_up = True
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=loss_fn) as pipe:
        assert torch.allclose(pipe.step(x, update=False).loss, want)
        assert all(torch.allclose(p.grad, g) for p, g in zip(pipe.parameters(), wanted, strict=True))
        assert torch.allclose(pipe.evaluate([(x, None)].__iter__()).loss, want.double())


class OfTokens:
    """A loss that the model computes, whose targets are counted by a method; counts its calls."""

    num_counted = 0

    def __call__(self, output: dict[str, Tensor], _: Tensor | None) -> Tensor:
        return output["loss"]

    def weight(self, targets: Tensor) -> int:
        self.num_counted += 1
        return int(targets.sum())


def test_a_weight_without_targets_to_count_is_an_error() -> None:
    """The method was not called, and microbatches were weighed by samples."""
    model, counted = [nn.Linear(4, 4), GivesLoss(4, 4)], OfTokens()
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=counted) as pipe:
        with pytest.raises(RuntimeFailure, match=r"no targets were given; call step\(inputs, targets\)"):
            pipe.step(torch.randn(8, 4), update=False)
        pipe.evaluate([(torch.randn(8, 4), torch.ones(8))].__iter__())
        assert counted.num_counted == 4, "each microbatch is counted once"
