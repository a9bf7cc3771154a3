"""What layers cost: estimated and measured."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock.models import GPTConfig, build_layers, estimate_costs, gpt_costs, measure_costs

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


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
