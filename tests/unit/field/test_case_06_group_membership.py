"""Case 6: a load gives every parameter the options that it had, whatever the order of the optimizer's groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import penstock as ps
from penstock.runtime.checkpoint import CheckpointError
from tiers import others_nightly

WIDTH = 6
Given = Callable[[list[Parameter]], Optimizer]


def by_decay(params: list[Parameter]) -> Optimizer:
    decay, other = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return AdamW([{"params": decay, "weight_decay": 0.5}, {"params": other, "weight_decay": 0.0}], lr=0.01)


def swapped(params: list[Parameter]) -> Optimizer:
    decay, other = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return AdamW([{"params": other, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.5}], lr=0.01)


def each_by_itself(params: list[Parameter]) -> Optimizer:
    return AdamW([{"params": [p], "weight_decay": 0.5 * (p.ndim > 1)} for p in reversed(params)], lr=0.01)


def without_empty_groups(params: list[Parameter]) -> Optimizer:
    groups = [{"params": [p for p in params if p.ndim == n], "weight_decay": 0.5 * (n > 1)} for n in (2, 1)]
    return AdamW([group for group in groups if group["params"]], lr=0.01)


def three(params: list[Parameter]) -> Optimizer:
    matrices = [p for p in params if p.ndim > 1]
    parts = [(matrices[:1], 0.5), (matrices[1:], 0.5), ([p for p in params if p.ndim < 2], 0.0)]
    return AdamW([{"params": part, "weight_decay": decay} for part, decay in parts], lr=0.01)


SAME: dict[str, Given] = {
    "by decay": by_decay,
    "swapped": swapped,
    "each by itself": each_by_itself,
    "without empty groups": without_empty_groups,
    "three": three,
}


PAIRS = [(first, then) for first in SAME for then in SAME]
BY_DAY = [
    ("by decay", "swapped"),
    ("swapped", "each by itself"),
    ("each by itself", "without empty groups"),
    ("without empty groups", "three"),
    ("three", "by decay"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=k % 2 == 0) for k in range(4)), nn.Linear(WIDTH, 1, False))


def pipeline(optimizer: Any, num_stages: int = 1) -> ps.Pipeline:
    return ps.Pipeline(model(), ps.build("1f1b", num_stages, 4), loss_fn=nn.MSELoss(), optimizer=optimizer)


def train(pipe: ps.Pipeline, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        pipe.step(x, x.sum(1, keepdim=True))
        for group in pipe.optimizer.param_groups if pipe.optimizer is not None else ():
            group["lr"] *= 0.8


def named_options(pipe: ps.Pipeline) -> dict[str, tuple[float, float]]:
    assert pipe.optimizer is not None
    names = {p: name for name, p in pipe.named_parameters()}
    groups = pipe.optimizer.param_groups
    return {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


@pytest.mark.parametrize(("first", "then"), others_nightly(PAIRS, BY_DAY))
def test_groups_of_the_same_parameters_go_on_in_any_order(first: str, then: str, tmp_path: Path) -> None:
    pipe, after = pipeline(SAME[first]), pipeline(SAME[then], 3)
    train(pipe, range(2))
    after.load(pipe.save(tmp_path))
    assert named_options(after) == named_options(pipe)
    train(pipe, range(2, 4))
    train(after, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(pipe.parameters(), after.parameters(), strict=True))


def moved(params: list[Parameter]) -> Optimizer:
    decay, other = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return AdamW(
        [{"params": decay[:-1], "weight_decay": 0.5}, {"params": [*other, decay[-1]], "weight_decay": 0.0}], lr=0.01
    )


def one_group(params: list[Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (by_decay, moved, r"group 1 here: 4\.weight is beside 0\.bias here, and had another weight_decay"),
        (by_decay, one_group, r"group 0 here: 0\.weight is beside 0\.bias here, and had another weight_decay"),
    ],
)
def test_parameters_that_moved_are_named(first: Given, then: Given, said: str, tmp_path: Path) -> None:
    pipe, after = pipeline(first), pipeline(then)
    train(pipe, range(1))
    folder = pipe.save(tmp_path)
    before = named_options(after)
    with pytest.raises(CheckpointError, match=said):
        after.load(folder)
    with pytest.raises(ps.RuntimeFailure, match=said):
        pipe.hand_over(after)
    assert named_options(after) == before


def test_parameters_that_were_in_no_group_are_named(tmp_path: Path) -> None:
    pipe = pipeline(lambda params: AdamW(params[:2]))
    after = pipeline(lambda params: AdamW([{"params": params[:2]}, {"params": params[2:]}]))
    with pytest.raises(CheckpointError, match=r"group 1 here: no parameter group there has 1\.weight"):
        after.load(pipe.save(tmp_path))
