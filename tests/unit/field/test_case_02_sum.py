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
