"""What the split backward must know about one kind of module to defer its weight gradients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Rule(Protocol):
    """The arithmetic of one module, cut where its backward can be split.

    Each method runs the very kernels, on operands laid out the very way, that autograd's own node would, so
    that every gradient is bitwise the plain one. `weight` and `bias` arrive already in the compute dtype of
    autocast.
    """

    autocasts: bool
    """Autocast lowers the precision of this kind of op."""

    def pad(self, x: Tensor) -> Tensor:
        """What the module does to its input before the op itself; differentiated by autograd."""
        ...

    def work(self, x: Tensor, weight: Tensor) -> int:
        """About how many multiply-adds (or as costly) the weight gradient takes for this input."""
        ...

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The op, without autograd; never a view, so that it may be changed in place afterwards."""
        ...

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The gradient of `x`, given the gradient `g` of the output."""
        ...

    def weight_grads(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, each only if `needs` says so."""
        ...
