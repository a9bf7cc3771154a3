"""Adds W's gradients to `.grad` the way autograd would have, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add

import torch
from torch import Tensor

from penstock.runtime.shards import as_shard, local
from penstock.runtime.split.workspace import Workspace


class Accumulator:
    """Sums what one microbatch gives a parameter, and adds that sum to `.grad` once; of a DTensor, this rank's part.

    `uses` counts the gradients that will come for each parameter, by id; they come last use first. Autograd,
    too, adds the uses of a parameter to each other first, in the order of I and in the dtype they come in, and
    the sum to `.grad` afterwards.
    """

    def __init__(self, uses: Mapping[int, int]) -> None:
        self._uses = uses
        self._parts: dict[int, list[Tensor]] = {}
        self._workspace = Workspace()

    def workspace(self, p: Tensor) -> Workspace | None:
        """Where a gradient of `p` may be computed, unless it will be kept."""
        return self._workspace if p.grad is not None and self._uses.get(id(p)) == 1 else None

    def add(self, p: Tensor, grad: Tensor) -> None:
        """Take one gradient of `p`; with the last of them, `.grad` changes."""
        if self._uses[id(p)] > 1:
            parts = self._parts.setdefault(id(p), [])
            parts.append(grad)
            if len(parts) < self._uses[id(p)]:
                return
            del self._parts[id(p)]
            grad = reduce(add, reversed(parts))
        if grad.dtype != p.dtype:
            grad = grad.to(p.dtype)
        part = local(p)
        if p.grad is not None:
            local(p.grad).add_(grad)
        elif grad.stride() == part.stride():
            p.grad = as_shard(grad, p)
        else:
            p.grad = as_shard(torch.empty_like(part).copy_(grad), p)
