"""Clipping by the norm of the whole model's gradient, once, wherever its parts lie.

Norms are taken parameter by parameter, brought together in the model's order and combined as
`torch.nn.utils.clip_grad_norm_` does, so the result is the same to the bit however the model is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.tensors.dtensor import local, whole

_ABSENT = -1.0


def global_norm(
    dtypes: Mapping[str, torch.dtype], held: Mapping[str, Parameter], owned: Collection[str], peers: Peers
) -> Tensor:
    """The norm of all gradients of the model.

    Args:
        dtypes: of every parameter of the model, by name, in its order, each once.
        held: those in this process. Of one that several processes hold a shard of, they work the norm out together.
        owned: those that this process answers for, each by one process.
    """
    norms = torch.zeros(len(dtypes), dtype=torch.float64)
    for place, name in enumerate(dtypes):
        if name in held:
            gradient = held[name].grad
            if gradient is not None and gradient.is_sparse:
                raise RuntimeFailure(
                    f"{name} has a sparse gradient, which clip_norm cannot measure; make the op that gave it dense "
                    "(sparse=False), or leave clip_norm out"
                )
            norm = None if gradient is None else whole(torch.linalg.vector_norm(gradient.detach()))
            if name in owned:
                norms[place] = _ABSENT if norm is None else norm.double()
    norms = peers.sum(norms)
    # A norm has the real type of its gradient.
    present = [(norm, dtype) for norm, dtype in zip(norms, dtypes.values(), strict=True) if norm != _ABSENT]
    if not present:
        return torch.tensor(0.0)
    order = _in_torchs_order([torch.empty(0, dtype=dtype) for _, dtype in present])
    return torch.linalg.vector_norm(torch.stack([present[k][0].to(present[k][1].to_real()) for k in order]))


def _in_torchs_order(gradients: Sequence[Tensor]) -> list[int]:
    """The places of gradients in the order in which `clip_grad_norm_` combines their norms: type by type."""
    groups = Optimizer._group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
    return [place for _, places in groups.values() for place in places]


def scale_gradients(parameters: Sequence[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that the whole has at most `max_norm`; one that tied parameters share, once."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = {id(p.grad): p.grad for p in parameters if p.grad is not None}
    for gradient in gradients.values():
        local(gradient).mul_(factor.to(gradient.device))
