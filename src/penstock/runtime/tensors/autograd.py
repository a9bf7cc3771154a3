"""A stage's autograd graph: where inputs enter it, where outputs leave it, and how a backward starts.

Inputs are not leaves of the graph, so the stage may change them in place, as it could in a plain loop. Each gradient
is caught when it arrives, without a copy, and in the memory layout in which a plain loop would have passed it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from penstock.runtime.errors import RuntimeFailure

_ENGINE = getattr(Variable, "_execution_engine", None)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """`torch.autograd.backward`, which takes as long to look at what it is given as autograd takes for a few ops; so
    plain tensors on a CPU, whose gradients fit, go to autograd's engine at once.
    """
    if _ENGINE is None or not all(map(_fits, outputs, gradients)):
        torch.autograd.backward(outputs, gradients)
        return
    starts = tuple(torch.ones_like(y) if g is None else g for y, g in zip(outputs, gradients, strict=True))
    _ENGINE.run_backward(tuple(outputs), starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _fits(output: Tensor, gradient: Tensor | None) -> bool:
    if type(output) is not Tensor or not output.is_cpu or output.layout is not torch.strided:
        return False
    if gradient is None:
        return output.numel() == 1 and output.is_floating_point() and output.requires_grad
    return type(gradient) is Tensor and gradient.shape == output.shape and gradient.dtype is output.dtype


def added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """A sum of gradients with one more part, neither of which is changed; None stands for none."""
    if total is None or part is None:
        return part if total is None else total
    return total + part


class GraphInputs:
    """The inputs of one microbatch that want a gradient.

    Attributes:
        tensors: the same memory as those given, for the stage to use. None are left once the forward has ended.
        grads: their gradients, once the backward ran; None if none came.
    """

    __slots__ = ("_given", "grads", "tensors")

    def __init__(self, given: list[Tensor]) -> None:
        self._given = given
        self.grads: list[Tensor | None] = [None] * len(given)
        self.tensors: tuple[Tensor, ...] = _enter(_ANCHOR, self) if given else ()

    def entering(self) -> tuple[Tensor, ...]:
        # Detached, they still count changes in place with the tensors of the stage before, whose backward may have
        # to refuse them.
        return tuple([tensor.detach() for tensor in self._given])

    def take(self, grads: Sequence[Tensor | None]) -> None:
        if self.tensors:  # the forward still runs
            raise RuntimeFailure(
                "a layer or loss_fn calls backward() itself, and the gradient goes back into the stage before, whose "
                "backward comes later and once; return that loss, so that loss_fn adds it, or detach what the layer "
                "computes it from"
            )
        self.grads = list(grads)

    def close(self) -> None:
        """After the forward."""
        self._given, self.tensors = [], ()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: GraphInputs) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        return entry.entering()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.entry.take(grads)
        return None, None


# Past what `Function.apply` looks for in Python: transforms of torch.func, of which none is there between stages.
_enter: Any = super(torch.autograd.Function, _Enter).apply


def exits(output: Tensor) -> Tensor:
    """An output that a later stage may change in place, as the backward starts from it: a view would then be one of
    what its base has become.
    """
    return _Exit.apply(output) if output._is_view() else output


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


_ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""What makes autograd take note; it never gets a gradient."""
