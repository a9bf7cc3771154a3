"""What the split backward must know about one kind of module to defer its weight gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.workspace import Workspace
from penstock.runtime.tensor_parallel import OnShard

REAL = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
COMPLEX = frozenset({torch.complex64, torch.complex128})


class SplitRule(ABC):
    """The arithmetic of one module, cut where its backward can be split.

    Each method runs the kernels of autograd's own node, on operands laid out as that node lays them out, so
    that every gradient is bitwise the plain one. `weight` and `bias` arrive in the compute dtype of autocast, and of
    a DTensor as this rank's shard.
    """

    biased = True
    """The module has a parameter named `bias`, which may be None."""
    autocasts = True
    """Autocast lowers the precision of this op."""
    pads = False
    """The module changes its input before the op itself."""
    turns = False
    """The plain module transposes its weight at every call. That node is then there here too: whoever differentiates
    twice adds up there what one call gives the weight."""
    dtypes = REAL
    """Of weights that the arithmetic is right for; others are left to autograd."""

    def plain(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the module does by itself, as it was before it was prepared."""
        if isinstance(module, OnShard):
            return type(module).on_shard(module, x)
        y: Tensor = type(module).forward(module, x)
        return y

    def pad(self, x: Tensor) -> Tensor:
        """What a module that pads does to its input; differentiated by autograd."""
        return x

    def gives_view(self, x: Tensor, bias: Tensor | None) -> bool:
        """Whether what the plain module returns is a view, so that a change in place of it goes by its base."""
        return False

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the arithmetic is right for these types."""
        dtype = weight.dtype
        return dtype in self.dtypes and x.dtype is dtype and (bias is None or bias.dtype is dtype)

    @abstractmethod
    def work(self, x: Tensor, weight: Tensor) -> int:
        """About how many multiply-adds (or as costly) the weight gradient takes for this input."""

    def rows(self, x: Tensor) -> int:
        """How often this input uses each entry of the weight."""
        return x.numel() // max(x.shape[-1], 1)

    @abstractmethod
    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The op as the module runs it, for autograd to differentiate: whoever differentiates twice gets this."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The op, without autograd; never a view, so that it may be changed in place afterwards."""

    @abstractmethod
    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The gradient of `x`, given the gradient `g` of the output."""

    @abstractmethod
    def weight_grads(
        self,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        workspace: Workspace | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, each only if `needs` says so; the first in `workspace` if it may.

        A workspace is given only outside autograd.
        """
