"""Norms that gather statistics of what goes through them."""

from __future__ import annotations

from torch import nn

GATHERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules whose forward changes buffers in training, some in ways that no tensor's count of changes shows."""
