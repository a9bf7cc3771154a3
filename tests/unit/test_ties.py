"""Parameters that several stages share, in one process: as in the plain loop, whatever the schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
import tie_runs
from plain_loop import differences, plain_step
from tie_runs import MSE


@pytest.mark.parametrize("given", tie_runs.GIVEN)
@pytest.mark.parametrize(("name", "options"), tie_runs.SCHEDULES)
def test_tied_weights_with_several_pipelines(name: str, options: dict[str, Any], given: str) -> None:
    assert not tie_runs.wrong_copies(name, options, given, zero=True)


def test_tied_weights_with_several_pipelines_and_an_optimizer_each() -> None:
    assert not tie_runs.wrong_copies("chimera", {}, "sequential", zero=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
@pytest.mark.parametrize("start", [False, True])
def test_a_tied_weight_frozen_and_unfrozen_between_steps(name: str, start: bool) -> None:
    schedule = ps.build(name, 2, 4)
    model = tie_runs.tied_model(schedule.num_stages)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each[0][0].weight.requires_grad_(start)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    for number, (x, y) in enumerate(tie_runs.steps(9, 4), start=1):
        wanted = start == (number % 2 == 1)
        for each in (model, plain):
            each[0][0].weight.requires_grad_(wanted)
        if schedule.placement.num_pipelines > 1:
            _, want = tie_runs.grouped_step(plain, x, y, schedule, number)
        else:
            plain_step(plain, x, y, schedule.num_microbatches, MSE, step=number)
            want = {n: p.grad for n, p in plain.named_parameters()}
        pipe.step(x, y, update=False)
        assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
        assert (want["0.0.weight"] is not None) == wanted
        pipe.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_hooks_on_a_tied_weight_see_whole_gradients_once_a_microbatch(name: str) -> None:
    schedule = ps.build(name, 2, 4)
    model = tie_runs.tied_model(schedule.num_stages)
    plain = copy.deepcopy(model)
    seen: dict[str, list[torch.Tensor]] = {"pipe": [], "plain": []}

    def hooked(key: str, weight: nn.Parameter) -> None:
        def doubled(gradient: torch.Tensor) -> torch.Tensor:
            seen[key].append(gradient.clone())
            return gradient * 2

        weight.register_hook(doubled)
        weight.register_post_accumulate_grad_hook(lambda p: seen[key].append(p.grad.clone()))

    hooked("pipe", model[0][0].weight)
    hooked("plain", plain[0][0].weight)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    x, y = tie_runs.steps(9, 1)[0]
    plain_step(plain, x, y, 4, MSE)
    pipe.step(x, y, update=False)
    want = {n: p.grad for n, p in plain.named_parameters()}
    assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
    assert len(seen["pipe"]) == len(seen["plain"]) == 8
    assert all(torch.equal(a, b) for a, b in zip(seen["pipe"], seen["plain"], strict=True))
