"""Clipping by the norm of the whole model's gradient, once, wherever its parts lie.

Norms are taken parameter by parameter, brought together in the model's order and combined as
`torch.nn.utils.clip_grad_norm_` does, so the result is the same to the bit however the model is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.peers import Peers

_ABSENT = -1.0


def global_norm(names: Sequence[str], owned: Mapping[str, Parameter], peers: Peers) -> Tensor:
    """The norm of all gradients of the model.

    Args:
        names: every parameter of the model, in its order, each once.
        owned: those that this process answers for, each by one process.
    """
    norms = torch.zeros(len(names), dtype=torch.float64)
    dtype = next((p.dtype for p in owned.values()), torch.float32)
    for place, name in enumerate(names):
        if name in owned:
            gradient = owned[name].grad
            if gradient is None:
                norms[place] = _ABSENT
            else:
                norm = torch.linalg.vector_norm(gradient.detach())
                norms[place] = norm.double()
    norms = peers.sum(norms)
    present = norms[norms >= 0].to(dtype)
    return torch.linalg.vector_norm(present) if present.numel() else torch.zeros((), dtype=dtype)


def scale_gradients(parameters: Sequence[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that the whole has at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
