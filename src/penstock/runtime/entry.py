"""Where a stage's inputs enter its autograd graph.

Not as leaves: the stage may then change them in place, as it could in a plain loop, and each gradient is
caught as it comes, with no copy and in the memory layout in which a plain loop would have passed it on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Entry:
    """The inputs of one microbatch that want a gradient.

    Attributes:
        tensors: the same memory as those given, for the stage to use.
        grads: their gradients, once the backward ran; None where none came.
    """

    def __init__(self, given: list[Tensor]) -> None:
        self._given = given
        self.grads: list[Tensor | None] = [None] * len(given)
        self.tensors: tuple[Tensor, ...] = _Enter.apply(_ANCHOR, self) if given else ()

    def entering(self) -> tuple[Tensor, ...]:
        # `.data`, as a view would refuse changes in place.
        return tuple(tensor.data for tensor in self._given)

    def close(self) -> None:
        """After the forward: whoever shares memory that the stage changed in place must know."""
        for given, tensor in zip(self._given, self.tensors, strict=True):
            if tensor._version:
                torch.autograd.graph.increment_version(given)
        self._given, self.tensors = [], ()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: Entry) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        return entry.entering()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.entry.grads = list(grads)
        return None, None


_ANCHOR = torch.zeros((), requires_grad=True)
"""What makes autograd take note; it never gets a gradient."""
