"""Stages of anyone's model: the same numbers, under the same names, and their costs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock.models import (
    GPTConfig,
    PartitionError,
    Stage,
    build_layers,
    estimate_costs,
    gpt_costs,
    gpt_stage,
    measure_costs,
    shared_parameters,
    stages,
)

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Split(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x, x * 2)


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": self.linear(left) + right}


class Open(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["sum"]


def chain(parts: list[Stage], *args: object) -> object:
    value: object = args
    for part in parts:
        value = part(*value) if isinstance(value, tuple) else part(value)
    return value


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_sequential_keeps_its_numbers_and_its_names(num_stages: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    parts = stages(model, num_stages)
    x = torch.randn(3, 4)
    assert torch.equal(chain(parts, x), model(x))
    whole = dict(model.named_parameters())
    found = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    assert list(found) == list(whole)
    assert all(found[name] is whole[name] for name in whole)


def test_named_children_keep_their_own_names() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), last=nn.Linear(2, 2)))
    names = [list(part.state_dict()) for part in stages(model, 2)]
    assert names == [["first.weight", "first.bias"], ["last.weight", "last.bias"]]


def test_a_list_is_named_like_a_gpt() -> None:
    parts = stages([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], 2, costs=[1, 1])
    assert list(parts[1].state_dict()) == ["layers.1.weight"]
    assert list(parts[1].layers_by_name) == ["1"]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_tuples_become_arguments_and_a_dict_stays_one(num_stages: int) -> None:
    layers = [Split(), Join(), Open()]
    x = torch.randn(2, 4)
    assert torch.equal(chain(stages(layers, num_stages, costs=[1, 1, 1]), x), layers[1].linear(x) + 2 * x)


def test_a_module_used_twice_runs_twice_and_is_reported_shared() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    parts = stages(model, 3, costs=[1, 1, 1])
    x = torch.randn(2, 3)
    assert torch.equal(chain(parts, x), model(x))
    assert torch.equal(chain(stages(model, 1), x), model(x))
    assert shared_parameters(parts) == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert shared_parameters(stages(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2)) == []


def test_a_replaced_layer_is_the_one_that_runs_also_in_a_copy() -> None:
    stage = gpt_stage(GPTConfig(vocab_size=5, context=4, depth=1, width=4, num_heads=1), [1])
    stage = copy.deepcopy(stage)
    stage.layers.add_module("1", nn.Identity())
    x = torch.randn(1, 2, 4)
    assert stage(x) is x


def test_errors_say_what_was_given() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(PartitionError, match="3 stages asked of a model of 2 layers"):
        stages(model, 3)
    with pytest.raises(ValueError, match="3 costs given for a model of 2 layers"):
        stages(model, 2, costs=[1, 2, 3])
    with pytest.raises(ValueError, match="a Linear cannot be cut"):
        stages(nn.Linear(2, 2), 2)


def test_estimates_agree_with_and_without_a_sample_and_count_the_head_not_the_embedding() -> None:
    config = GPTConfig(vocab_size=300, context=16, depth=2, width=32, num_heads=2)
    layers = build_layers(config)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    by_weight, by_size = estimate_costs(layers), gpt_costs(config)
    by_shape = [cost / tokens.numel() for cost in estimate_costs(layers, tokens)]
    assert by_shape[3] == pytest.approx(2 * 300 * 32, rel=0.05)
    for costs in (by_weight, by_size, by_shape):
        assert costs[0] < 0.05 * costs[1]
        assert costs[1] == costs[2]
        assert costs[3] / costs[1] == pytest.approx(by_shape[3] / by_shape[1], rel=0.15)
    assert layers[0].token.weight.device.type == "cpu"


def test_estimates_count_convolutions_by_their_shape() -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 2)]
    costs = estimate_costs(layers, torch.zeros(5, 3, 4, 4))
    assert costs[0] == 2 * 5 * 16 * 8 * 27 + 5 * 16 * 8
    assert costs[2] == 2 * 5 * 128 * 2 + 10


def test_measured_costs_find_the_heavy_layer_and_leave_no_trace() -> None:
    heavy = nn.Linear(512, 512)
    layers = [
        nn.Linear(4, 512),
        nn.ReLU(inplace=True),
        nn.Sequential(*[heavy] * 6),
        nn.BatchNorm1d(512),
        nn.Dropout(0.5),
    ]
    state = torch.random.get_rng_state()
    before = copy.deepcopy([layer.state_dict() for layer in layers])
    x = torch.randn(256, 4)
    torch.random.set_rng_state(state)
    costs = measure_costs(layers, x, num_repeats=3)
    assert max(costs) == costs[2]
    assert all(cost > 0 for cost in costs)
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    for layer, old in zip(layers, before):
        assert all(torch.equal(value, old[name]) for name, value in layer.state_dict().items())


def test_measuring_follows_tuples_dicts_and_frozen_layers() -> None:
    layers = [nn.Embedding(7, 4), Split(), Join(), Open(), nn.Linear(4, 1).requires_grad_(False)]
    assert len(measure_costs(layers, torch.zeros(2, 3, dtype=torch.long), num_repeats=1)) == 5
    assert len(estimate_costs(layers, torch.zeros(2, 3, dtype=torch.long))) == 5
