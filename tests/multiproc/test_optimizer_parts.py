"""Optimizers of which each process has a part: that of its own stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import RuntimeFailure
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def pipeline(net: nn.Module, optimizer: Any, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(net, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), optimizer=optimizer, **options)


def of_trained(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p for p in parameters if p.requires_grad)


def whole_again(rank: int) -> list[list[int]]:
    """How many parameters a given optimizer has in a pipeline, after it, and after one that could not be made."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pipeline(net, optimizer) as pipe:
        pipe.step(torch.ones(8, 6), torch.zeros(8, 6))
        found = [len(group["params"]) for group in optimizer.param_groups]
    found += [len(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(RuntimeFailure, match="ops"):
        pipeline(net, optimizer, ops={"X": print})
    return [found, [len(group["params"]) for group in optimizer.param_groups]]


def test_a_given_optimizer_stayed_shortened_after_its_pipeline() -> None:
    for outcome in run_ranks_to_end(2, whole_again):
        assert outcome.value == [[2, 4], [4]]


def frozen(rank: int) -> list[float]:
    net = model()
    net[0].requires_grad_(False)
    with pipeline(net, of_trained) as pipe:
        return [pipe.step(torch.ones(8, 6), torch.zeros(8, 6)).loss.item() for _ in range(2)]


def test_a_rank_whose_stages_are_frozen_had_an_empty_parameter_list() -> None:
    net = model()
    net[0].requires_grad_(False)
    with pipeline(net, of_trained) as pipe:
        losses = [pipe.step(torch.ones(8, 6), torch.zeros(8, 6)).loss.item() for _ in range(2)]
    assert losses[1] < losses[0]
    for outcome in run_ranks_to_end(2, frozen):
        assert outcome.value == losses
