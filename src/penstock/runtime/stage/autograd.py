"""Starts torch's autograd from several outputs of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

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
    if type(output) is not Tensor or output.device.type != "cpu" or output.layout is not torch.strided:
        return False
    if gradient is None:
        return output.numel() == 1 and output.is_floating_point() and output.requires_grad
    return type(gradient) is Tensor and gradient.shape == output.shape and gradient.dtype is output.dtype
