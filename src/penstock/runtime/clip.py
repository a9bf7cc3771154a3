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


def global_norm(dtypes: Mapping[str, torch.dtype], owned: Mapping[str, Parameter], peers: Peers) -> Tensor:
    """The norm of all gradients of the model.

    Args:
        dtypes: of every parameter of the model, by name, in its order, each once.
        owned: those that this process answers for, each by one process.
    """
    norms = torch.zeros(len(dtypes), dtype=torch.float64)
    for place, name in enumerate(dtypes):
        if name in owned:
            gradient = owned[name].grad
            if gradient is None:
                norms[place] = _ABSENT
            else:
                norm = torch.linalg.vector_norm(gradient.detach())
                norms[place] = norm.double()
    norms = peers.sum(norms)
    present = [norm.to(dtype) for norm, dtype in zip(norms, dtypes.values(), strict=True) if norm >= 0]
    return torch.linalg.vector_norm(torch.stack(present)) if present else torch.tensor(0.0)


def scale_gradients(parameters: Sequence[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that the whole has at most `max_norm`; one that tied parameters share, once."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = {id(p.grad): p.grad for p in parameters if p.grad is not None}
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.device))
