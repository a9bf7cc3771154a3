"""A model and a batch on a GPU, for tests of pipelines there; alike wherever they are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64)]
    return nn.Sequential(*layers).cuda()


def build_batch() -> tuple[Tensor, Tensor]:
    """Of 30 samples, so that eight microbatches are ragged."""
    torch.manual_seed(1)
    return torch.randn(30, 64, device="cuda"), torch.randn(30, 64, device="cuda")
