"""Adds W's gradients to `.grad` the way autograd would have, to the last bit."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor


class Accumulator:
    """Sums what one microbatch gives a parameter, and adds that sum to `.grad` once.

    `uses` counts the gradients still to come for each parameter, by id. Autograd, too, adds the uses of a
    parameter to each other first, in the dtype they come in, and the sum to `.grad` afterwards.
    """

    def __init__(self, uses: MutableMapping[int, int]) -> None:
        self._uses = uses
        self._sums: dict[int, Tensor] = {}

    def add(self, p: Tensor, grad: Tensor) -> None:
        """Take one gradient of `p`; with the last of them, `.grad` changes."""
        key = id(p)
        left = self._uses[key] - 1
        if left or key in self._sums:
            before = self._sums.pop(key, None)
            if before is not None:
                grad = before + grad
            if left:
                self._uses[key], self._sums[key] = left, grad
                return
        if grad.dtype != p.dtype:
            grad = grad.to(p.dtype)
        total = p.grad
        if total is not None:
            total.add_(grad)
        elif grad.stride() == p.stride():
            p.grad = grad
        else:
            p.grad = torch.empty_like(p).copy_(grad)
