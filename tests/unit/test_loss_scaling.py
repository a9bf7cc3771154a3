"""Autocast to float16 without a scaled loss: what is lost, and that it is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("dtype", "is_lost"), [(torch.float16, True), (torch.bfloat16, False), (None, False)])
def test_float16_without_loss_scaling_is_told(dtype: torch.dtype | None, is_lost: bool) -> None:
    """A gradient that float16 can't hold is 0, and the loss looks as it should."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    schedule, precision = ps.build("1f1b", 2, 2), ps.PrecisionOptions(autocast=dtype)
    with ps.Pipeline(model, schedule, loss_fn=lambda y, t: 1e-8 * (y - t).sum(), precision=precision) as p:
        p.step(torch.ones(4, 4), torch.zeros(4, 1), update=False)
        assert [bool((parameter.grad == 0).all()) for parameter in p.parameters()] == [is_lost] * 4
        assert sum("loss scaling" in notice for notice in p.notices) == is_lost
