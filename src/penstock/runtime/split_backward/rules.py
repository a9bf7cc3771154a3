"""How split backward defers the weight gradients of each kind of module: one rule per kind.

    LinearRule, Conv1DRule     nn.Linear, and GPT-2's Conv1D of transformers: autograd's own matmuls
    ConvRule                   nn.Conv1d, nn.Conv2d, nn.Conv3d: autograd's convolution backward
    EmbeddingRule              nn.Embedding: the table's gradient, dense and often the largest of a first stage

Each rule computes one half at a time: the gradient of the input in I, the gradients of weight and bias in W.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    ShardedModule,
    VocabularyEmbedding,
    VocabularyLinear,
)


class Workspace:
    """Lends the same memory, over and over.

    A fresh tensor for each would be handed back to the system and zeroed again by it, again and again: at width 512
    that costs W a tenth of its time on a CPU.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, t: Tensor) -> Tensor:
        """A contiguous tensor of the shape of `t` and undefined content, good until the next call."""
        memory = self._memory.get((t.dtype, t.device))
        if memory is None or memory.numel() < t.numel():
            memory = self._memory[t.dtype, t.device] = torch.empty(t.numel(), dtype=t.dtype, device=t.device)
        return memory[: t.numel()].view(t.shape)


REAL = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
COMPLEX = frozenset({torch.complex64, torch.complex128})
Needs = tuple[bool, bool]
"""Whether the gradient of the weight is wanted, and that of the bias."""
Gradients = tuple[Tensor | None, Tensor | None]
"""Of the weight, and of the bias."""
_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)}
"""Torch's own: a class that was given another one has no rule."""


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
    has_options = False
    """The rule is made from attributes of the module, which the user may change between steps."""
    turns = False
    """The plain module transposes its weight at every call. That node is there here too: whoever differentiates twice
    adds up there what one call gives the weight."""
    dtypes = REAL
    """Of weights that the arithmetic is right for; others are left to autograd."""

    def plain(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the module does by itself, as it was before it was prepared."""
        if isinstance(module, ShardedModule):
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
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, room: Workspace | None = None
    ) -> Gradients:
        """The gradients of weight and bias, each only if `needs` says so; the first in `room` if it may.

        Room is given only outside autograd.
        """


class LinearRule(SplitRule):
    """Splits the backward of a linear layer of any input rank; with or without its bias.

        y = x @ w.T + b        F    addmm, mm, or mm and add: as F.linear decides from the shape of x
        gx = g @ w.conj()      I
        gw = g.T @ x.conj()    W    written (x.conj().T @ g).T when w is not row-major, as autograd does
        gb = sum of g's rows   W

    A `Conv1D` has w the other way round, and always runs addmm on the rows of x. The expressions differ in their
    rounding, so each follows what the nodes of torch's graph do (AddmmBackward0, MmBackward0, AddBackward0); a
    property test compares them over shapes and layouts.
    """

    turns = True
    dtypes = REAL | COMPLEX

    def __init__(self, biased: bool = True) -> None:
        self.biased = biased

    def work(self, x: Tensor, weight: Tensor) -> int:
        return x.numel() * weight.shape[0]

    def gives_view(self, x: Tensor, bias: Tensor | None) -> bool:
        return bias is not None and x.dim() != 2 and x.is_contiguous() and _linear_gives_view()

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            return F.linear(x, weight, bias)
        # `.data` of a view is a tensor of its own to autograd: the result may then be changed in place.
        if x.is_contiguous():
            return F.linear(x, weight, bias).data
        y = F.linear(_rows(x), weight)
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], weight.shape[0]).data

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A single number is column-major too, which autograd looks at first.
        if x.is_contiguous() and g.is_contiguous() and x.numel() != 1:
            return torch.matmul(g, _conj(weight))
        if x.dim() == 2:
            return _left_grad(g, x, weight)
        return _left_grad(_rows(g), _rows(x), weight).reshape(x.shape)

    def weight_grads(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, room: Workspace | None = None
    ) -> Gradients:
        rows, g_rows = _rows(x), _rows(g)
        gw: Tensor | None = None
        if needs[0]:
            if weight.stride() == (weight.shape[1], 1):
                out = None if room is None else room.like(weight)
                gw = torch.mm(g_rows.t(), _conj(rows), out=out)
            else:
                gw = _conj(rows.t()).mm(g_rows).t()
        gb: Tensor | None = None
        if needs[1]:
            # F.linear adds the bias to the matrix of rows, or to the result in its own shape: the sum follows.
            gb = g_rows.sum(0) if x.is_contiguous() or x.dim() < 3 else g.sum(tuple(range(g.dim() - 1)))
        return gw, gb


class Conv1DRule(SplitRule):
    """Splits the backward of a linear layer whose weight is [in, out]."""

    dtypes = REAL | COMPLEX

    @staticmethod
    def is_for(module: nn.Module) -> bool:
        """Whether a module is transformers' `Conv1D`; where nothing has imported that, nothing is."""
        library = sys.modules.get("transformers.pytorch_utils")
        return library is not None and type(module) is getattr(library, "Conv1D", None)

    def gives_view(self, x: Tensor, bias: Tensor | None) -> bool:
        return True

    def work(self, x: Tensor, weight: Tensor) -> int:
        return x.numel() * weight.shape[1]

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)  # type: ignore[arg-type]
        return y.view(*x.shape[:-1], weight.shape[1])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.op(x, weight, bias).data

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return _left_grad(g.reshape(-1, weight.shape[1]), rows, weight.t()).view(x.shape)

    def weight_grads(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, room: Workspace | None = None
    ) -> Gradients:
        rows, g_rows = x.view(-1, x.shape[-1]), g.reshape(-1, weight.shape[1])
        gw: Tensor | None = None
        if needs[0]:
            if weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]:
                gw = g_rows.t().mm(_conj(rows)).t()
            else:
                out = None if room is None else room.like(weight)
                gw = torch.mm(_conj(rows.t()), g_rows, out=out)
        return gw, g_rows.sum(0) if needs[1] else None


@cache
def _linear_gives_view() -> bool:
    """Whether this torch's `F.linear` of other than two dimensions gives a view, as it does before torch 2.15."""
    one = torch.ones((), device="cpu")
    return F.linear(one.view(1, 1, 1), one.view(1, 1), one.view(1))._is_view()


def _rows(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _left_grad(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if x.stride(0) == 1 and x.stride(1) == x.shape[0]:
        return torch.mm(_conj(weight.t()), g.t()).t()
    return torch.mm(g, _conj(weight))


def _conj(t: Tensor) -> Tensor:
    return t.conj() if t.is_complex() else t


Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvRule(SplitRule):
    """Splits the backward of a convolution with any stride, padding mode, dilation and groups."""

    has_options = True

    def __init__(self, module: Conv) -> None:
        self._stride = list(module.stride)
        self._batched_dim = len(self._stride) + 2
        self._mode = module.padding_mode
        self.pads = self._mode != "zeros"
        nothing = [0] * len(self._stride)
        padding = nothing if self.pads else _padding(module)
        self._around = list(module._reversed_padding_repeated_twice)
        self._call = self._stride, padding, list(module.dilation), False, nothing, module.groups

    @staticmethod
    def knows(module: Conv) -> bool:
        """True unless the padding differs between two opposite sides (`padding="same"`, even kernel), or an option
        that somebody has set does not say what it is for each dimension.
        """
        each = [module.stride, module.dilation, *([] if isinstance(module.padding, str) else [module.padding])]
        if not all(isinstance(option, tuple) and len(option) == len(module.kernel_size) for option in each):
            return False
        if module.padding != "same":
            return True
        return all(d * (k - 1) % 2 == 0 for d, k in zip(module.dilation, module.kernel_size))

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, self._around, mode=self._mode)

    def gives_view(self, x: Tensor, bias: Tensor | None) -> bool:
        return x.dim() != self._batched_dim

    def work(self, x: Tensor, weight: Tensor) -> int:
        num_places = x.numel() // max(x.shape[-self._batched_dim + 1], 1) // prod(self._stride)
        return num_places * weight.numel()

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == self._batched_dim:
            return torch.convolution(x, weight, bias, *self._call)
        return torch.convolution(x.unsqueeze(0), weight, bias, *self._call).squeeze(0)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.op(x, weight, bias)
        return y if x.dim() == self._batched_dim else y.data

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gx = self._backward(g, x, weight, bias, [True, False, False])[0]
        return gx if x.dim() == self._batched_dim else gx.squeeze(0)

    def weight_grads(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, room: Workspace | None = None
    ) -> Gradients:
        _, gw, gb = self._backward(g, x, weight, bias, [False, *needs])
        return (gw if needs[0] else None), (gb if needs[1] else None)

    def _backward(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.dim() != self._batched_dim:
            g, x = g.unsqueeze(0), x.unsqueeze(0)
        sizes, backward = None if bias is None else list(bias.shape), torch.ops.aten.convolution_backward
        grads: tuple[Tensor, Tensor, Tensor] = backward(g, x, weight, sizes, *self._call, wanted)
        return grads


def _padding(module: Conv) -> list[int]:
    if module.padding == "valid":
        return [0] * len(module.stride)
    if module.padding == "same":
        return [d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size)]
    return [int(amount) for amount in module.padding]


# Filling, scattering and adding one entry of the table's gradient takes about as long as this many
# multiply-adds of a matmul (memory traffic against arithmetic).
_WORK_PER_ENTRY = 16


class EmbeddingRule(SplitRule):
    """Splits the backward of a table lookup; I has nothing to compute, indices have no gradient."""

    biased = False
    autocasts = False
    has_options = True

    def __init__(self, module: nn.Embedding) -> None:
        padding = module.padding_here if isinstance(module, VocabularyEmbedding) else module.padding_idx
        self._padding = -1 if padding is None else padding
        self._by_frequency = module.scale_grad_by_freq

    @staticmethod
    def knows(module: nn.Embedding) -> bool:
        """True unless the gradient is sparse or the lookup itself rewrites the table (`max_norm`)."""
        return not module.sparse and module.max_norm is None

    def work(self, x: Tensor, weight: Tensor) -> int:
        return _WORK_PER_ENTRY * (weight.numel() + x.numel() * weight.shape[1])

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return weight.dtype in self.dtypes

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self._padding if self._padding >= 0 else None
        return F.embedding(x, weight, padding, scale_grad_by_freq=self._by_frequency)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.op(x, weight, bias).data

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise TypeError("the indices of an embedding have no gradient")

    def weight_grads(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, room: Workspace | None = None
    ) -> Gradients:
        gw: Tensor = torch.ops.aten.embedding_dense_backward(g, x, weight.shape[0], self._padding, self._by_frequency)
        return gw, None


def rule_for(module: nn.Module) -> SplitRule | None:
    """The rule of a module, with its options as they are now. None if it has none, or its class another forward."""
    kind = type(module)
    if kind in _FORWARDS and kind.forward is not _FORWARDS[kind]:
        return None
    if kind in (nn.Linear, ColumnLinear, VocabularyLinear):
        return LinearRule()
    if kind is RowLinear:
        return LinearRule(biased=False)
    if Conv1DRule.is_for(module):
        return Conv1DRule()
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and kind in _FORWARDS:
        return ConvRule(module) if ConvRule.knows(module) else None
    if isinstance(module, nn.Embedding) and kind in (nn.Embedding, VocabularyEmbedding):
        return EmbeddingRule(module) if EmbeddingRule.knows(module) else None
    return None
