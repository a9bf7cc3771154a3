"""What of a parameter's changes between two steps is seen in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import RuntimeFailure


def amdp() -> ps.Pipeline:
    """Two pipelines in one process."""
    torch.manual_seed(0)
    schedule = ps.build("amdp", 4, 8, window=4)
    layers = [nn.Linear(4, 4) for _ in range(schedule.num_stages)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return ps.Pipeline(nn.Sequential(*layers), schedule, loss_fn=nn.MSELoss(), optimizer=optimizer)


def test_bug_clearing_the_gradients_of_an_open_window_left_those_of_all_pipelines_but_one() -> None:
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    found = []
    for clear in (ps.Pipeline.zero_grad, lambda pipe: nn.ParameterList(pipe.parameters()).zero_grad()):
        pipe = amdp()
        pipe.step(x, y, update=False)
        clear(pipe)
        pipe.step(x, y)
        found.append([parameter.detach().clone() for parameter in pipe.parameters()])
    assert all(map(torch.equal, *found))


def test_bug_gradients_of_an_open_window_that_were_changed_were_those_of_one_pipeline() -> None:
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    pipe = amdp()
    pipe.step(x, y, update=False)
    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.1)
    with pytest.raises(
        RuntimeFailure, match=r"0\.weight of stage 0 was changed while a window was open, and each of 2"
    ):
        pipe.step(x, y)
    pipe.zero_grad()
    pipe.step(x, y)
