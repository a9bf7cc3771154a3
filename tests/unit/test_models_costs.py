"""What layers cost by their sizes is about what torch counts when they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.models import (
    BERTConfig,
    GPTConfig,
    bert_costs,
    bert_layers,
    build_layers,
    clip_presets,
    gpt_costs,
    tower_costs,
    tower_layers,
)

pytestmark = pytest.mark.unit


def counted(layers: Sequence[nn.Module], value: Any) -> list[float]:
    """FLOPs of the matrix products in each layer's forward, as torch counts them."""
    found = []
    for layer in layers:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = layer(value)
        found.append(float(counter.get_total_flops()))
    return found


def test_a_gpt_counts_the_head_and_not_the_embedding() -> None:
    config = GPTConfig(vocab_size=300, context=16, depth=2, width=32, num_heads=2)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    costs, flops = gpt_costs(config), counted(build_layers(config), tokens)
    assert costs[3] * tokens.numel() == flops[3] > 0
    assert costs[1] == costs[2]
    assert costs[1] * tokens.numel() == pytest.approx(flops[1], rel=0.1)
    assert costs[0] < 0.05 * costs[1]


def test_a_bert_counts_its_heads() -> None:
    config = BERTConfig(vocab_size=200, context=12, depth=3, width=32, num_heads=2)
    costs, flops = bert_costs(config), counted(bert_layers(config), torch.zeros(2, 12, dtype=torch.long))
    assert costs[4] / costs[1] == pytest.approx(flops[4] / flops[1], rel=0.2)


@pytest.mark.parametrize("name", ["audio", "text", "video"])
def test_a_tower_counts_its_blocks(name: str) -> None:
    config = clip_presets["nano"]
    tower = config.tower(name)
    shape = (1, tower.context) if tower.num_features is None else (1, tower.context, tower.num_features)
    given = torch.zeros(shape, dtype=torch.long if tower.num_features is None else torch.float32)
    assert tower_costs(config, name)[1] == pytest.approx(counted(tower_layers(config, name), given)[1], rel=0.15)
