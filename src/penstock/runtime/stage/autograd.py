"""Torch's autograd: a start from several outputs of a stage, and who is to see the gradient of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

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


def sees_gradients(parameter: Tensor, *, when_added: bool = True) -> bool:
    """Whether a hook is to see the gradients of a parameter: one on itself, or on its node in autograd's graph.

    Args:
        when_added: count those that are called when a gradient was added, too.
    """
    if parameter._backward_hooks or (when_added and parameter._post_accumulate_grad_hooks):
        return True
    if not parameter.requires_grad:
        return False
    node = get_gradient_edge(parameter).node
    handles = node.register_hook(_nothing), node.register_prehook(_nothing)
    found = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return found


def _nothing(*_: Any) -> None:
    """Sees a gradient and lets it be."""
