"""Gradients, or parameters, of several tensors as one message.

    | gradient | gradient | gradient | there 1 1 1 |

The last numbers say which tensors have a gradient at all, so that one which has none on any replica still has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.shards import as_shard, local, placements_of

BUCKET_BYTES = 25 * 2**20
"""Most bytes of a bucket, unless one tensor alone has more: large enough for a link's full speed, small enough that
the first is under way while others are being made."""


def cut_into_buckets(parameters: Iterable[Parameter], key: Callable[[Parameter], Any]) -> list[list[Parameter]]:
    """Parameters in groups of one type, device and `key`, in their order, each group within BUCKET_BYTES."""
    buckets: list[list[Parameter]] = []
    open_ones: dict[Any, tuple[list[Parameter], int]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device, key(parameter)
        size = local(parameter).numel() * parameter.element_size()
        bucket, held = open_ones.get(kind, ([], BUCKET_BYTES))
        if held + size > BUCKET_BYTES:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_ones[kind] = bucket, held + size
    return buckets


class GradientBucket:
    """The gradients of some parameters on their way through a sum over replicas."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        like = parameters[0]
        parts = [self._part(p) for p in parameters]
        there = torch.tensor([float(p.grad is not None) for p in parameters], dtype=like.dtype, device=like.device)
        self.flat = torch.cat([part.reshape(-1) for part in parts] + [there])

    def _part(self, parameter: Parameter) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(local(parameter))
        if gradient.is_sparse:
            raise RuntimeFailure(
                f"a parameter of shape {list(parameter.shape)} has a sparse gradient, and replicas add up dense "
                "ones; make the op that gave it dense (sparse=False)"
            )
        if placements_of(gradient) != placements_of(parameter):
            raise RuntimeFailure(
                f"a gradient lies as {placements_of(gradient)} and its parameter as {placements_of(parameter)}; let "
                "the stage's parallelize= keep both alike"
            )
        return local(gradient)

    def unpack(self) -> None:
        """Gives the parameters what the flat tensor now holds."""
        there = self.flat[-len(self._parameters) :].tolist()
        start = 0
        for parameter, found in zip(self._parameters, there, strict=True):
            mine = local(parameter)
            if found:
                part = self.flat[start : start + mine.numel()].view(mine.shape)
                gradient = None if parameter.grad is None else local(parameter.grad)
                if gradient is None:
                    parameter.grad = as_shard(part.clone(), parameter)
                else:
                    gradient.copy_(part)
            start += mine.numel()

    def drop(self) -> None:
        """Leaves no gradients: what a sum towards another process left here is no one's."""
        for parameter in self._parameters:
            parameter.grad = None


class ValueBucket:
    """The values of some tensors on their way from one process to others."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [local(t.detach()) for t in tensors]
        self.flat = torch.cat([t.reshape(-1) for t in self._tensors])

    def unpack(self) -> None:
        start = 0
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.copy_(self.flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()


def wait_for(work: Any, seconds: float) -> None:
    work.wait(timedelta(seconds=seconds))
