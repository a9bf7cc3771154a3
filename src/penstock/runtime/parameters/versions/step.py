"""An update of one stage: the sum over its copies, clipped by its own norm, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.parameters.gradients import Gradients, added
from penstock.runtime.tensors.dtensor import as_shard, whole


def summed(parts: Sequence[Gradients]) -> Gradients:
    """((g0 + g1) + g2) ..., parameter by parameter; none of the parts is changed."""
    return [reduce(added, gradients, None) for gradients in zip(*parts, strict=True)]


def clipped(gradients: Gradients, max_norm: float, masters: Sequence[Parameter]) -> Gradients:
    """Scaled so that the norm over all of them is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Of masters that are shards, all who hold them work the norm out together.
    """
    present = [as_shard(g, master) for g, master in zip(gradients, masters, strict=True) if g is not None]
    if not present:
        return gradients
    norm = torch.linalg.vector_norm(torch.stack([whole(torch.linalg.vector_norm(g)) for g in present]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return [None if g is None else g * factor for g in gradients]


def step(
    optimizer: Optimizer, masters: Sequence[Parameter], gradients: Gradients, rate: float | None, slowed: int = 1
) -> None:
    """Steps these masters alone: an optimizer passes over parameters without a gradient.

    Args:
        rate: learning rate of this step; that of the optimizer's groups where None.
        slowed: what the rate is divided by.
    """
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = None if gradient is None else as_shard(gradient, master)
    try:
        if any(gradient is not None for gradient in gradients):
            with learning_rate(optimizer, rate, slowed):
                optimizer.step()
    finally:
        for master in masters:
            master.grad = None


@contextmanager
def learning_rate(optimizer: Optimizer, rate: float | None, slowed: int = 1) -> Iterator[None]:
    """All groups have this learning rate in here, or their own, divided by `slowed`."""
    if rate is None and slowed == 1:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, before, strict=True):
        if rate is None:
            group["lr"] = own / slowed
        else:
            group["lr"] = torch.full_like(own, rate / slowed) if isinstance(own, Tensor) else rate / slowed
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = own
