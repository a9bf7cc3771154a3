"""`nn.Linear`, and GPT-2's `Conv1D` of transformers: autograd's own matmuls, one half at a time.

    y = x @ w.T + b        F    addmm, mm, or mm and add: as F.linear decides from the shape of x
    gx = g @ w.conj()      I
    gw = g.T @ x.conj()    W    written (x.conj().T @ g).T when w is not row-major, as autograd does
    gb = sum of g's rows   W

A `Conv1D` has w the other way round, and always runs addmm on the rows of x. The expressions differ in their
rounding, so each follows what the nodes of torch's graph do (AddmmBackward0, MmBackward0, AddBackward0); a property
test compares them over shapes and layouts.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.rule import COMPLEX, REAL, SplitRule
from penstock.runtime.stage.split_backward.workspace import Workspace
from penstock.runtime.tensor_parallel import OnShard


class LinearRule(SplitRule):
    """Splits the backward of a linear layer of any input rank; with or without its bias."""

    turns = True
    dtypes = REAL | COMPLEX

    def __init__(self, biased: bool = True) -> None:
        self.biased = biased

    def plain(self, module: nn.Module, x: Tensor) -> Tensor:
        if isinstance(module, OnShard):
            return super().plain(module, x)
        own = module._parameters  # straight from the dict, which pays for the patch
        try:
            weight, bias = own["weight"], own["bias"]
        except KeyError:  # pruned, normalized or the like: another tensor stands in for the parameter
            return nn.Linear.forward(module, x)  # type: ignore[arg-type]
        return F.linear(x, weight, bias)  # type: ignore[arg-type]

    def work(self, x: Tensor, weight: Tensor) -> int:
        return x.numel() * weight.shape[0]

    def gives_view(self, x: Tensor, bias: Tensor | None) -> bool:
        return bias is not None and x.dim() != 2 and x.is_contiguous()

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
        self,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        workspace: Workspace | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, g_rows = _rows(x), _rows(g)
        gw: Tensor | None = None
        if needs[0]:
            if weight.stride() == (weight.shape[1], 1):
                room = None if workspace is None else workspace.like(weight)
                gw = torch.mm(g_rows.t(), _conj(rows), out=room)
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
        self,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        workspace: Workspace | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, g_rows = x.view(-1, x.shape[-1]), g.reshape(-1, weight.shape[1])
        gw: Tensor | None = None
        if needs[0]:
            if weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]:
                gw = g_rows.t().mm(_conj(rows)).t()
            else:
                room = None if workspace is None else workspace.like(weight)
                gw = torch.mm(_conj(rows.t()), g_rows, out=room)
        return gw, g_rows.sum(0) if needs[1] else None


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
