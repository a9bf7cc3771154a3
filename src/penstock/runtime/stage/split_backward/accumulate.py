"""Adds W's gradients to `.grad` the way autograd would have, to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from penstock.runtime.stage.split_backward.workspace import Workspace
from penstock.runtime.tensors.dtensor import as_shard, local

Part = tuple[Hashable | None, Tensor]


class Accumulator:
    """Sums what one microbatch gives a parameter, and adds that sum to `.grad` once; of a DTensor, this rank's part.

    `uses` counts the gradients that will come for each parameter, by id; they come last use first. Autograd,
    too, adds the uses of a parameter to each other first, in the order of I, and the sum to `.grad` afterwards. Uses
    of one cast of a parameter are added in the type of the cast.
    """

    def __init__(self, uses: Mapping[int, int]) -> None:
        self._uses = uses
        self._parts: dict[int, list[Part]] = {}
        self._workspace = Workspace()

    def workspace(self, p: Tensor) -> Workspace | None:
        """Where a gradient of `p` may be computed, unless it will be kept."""
        return self._workspace if p.grad is not None and self._uses.get(id(p)) == 1 else None

    def add(self, p: Tensor, grad: Tensor, cast: Hashable | None) -> None:
        """Take one gradient of `p`, that came through a cast of it or not; with the last of them, `.grad` changes."""
        if self._uses[id(p)] > 1:
            parts = self._parts.setdefault(id(p), [])
            parts.append((cast, grad))
            if len(parts) < self._uses[id(p)]:
                return
            del self._parts[id(p)]
            grad = _sum(parts, p.dtype)
        if grad.dtype != p.dtype:
            grad = grad.to(p.dtype)
        part = local(p)
        if p.grad is not None:
            local(p.grad).add_(grad)
        elif grad.stride() == part.stride():
            p.grad = as_shard(grad, p)
        else:
            p.grad = as_shard(torch.empty_like(part).copy_(grad), p)


def _sum(parts: list[Part], dtype: torch.dtype) -> Tensor:
    parts.reverse()
    left = Counter(cast for cast, _ in parts)
    sums: dict[Hashable, Tensor] = {}
    total: Tensor | None = None
    for cast, grad in parts:
        if cast is not None:
            left[cast] -= 1
            grad = sums[cast] + grad if cast in sums else grad
            if left[cast]:
                sums[cast] = grad
                continue
        grad = grad.to(dtype)
        total = grad if total is None else total + grad
    assert total is not None
    return total
