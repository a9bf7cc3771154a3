"""What passes between the ranks that run a module together: sums, forward or backward, and a largest.

    entered    forward: nothing               backward: the sum of all ranks' gradients
    summed     forward: the sum of all ranks' backward: nothing

All ranks of a mesh run the same ops in the same order, backwards included, so nothing needs a name: the next sum here
is the next one there. Each has the mesh's own deadline.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure

__all__ = ["entered", "largest", "summed"]


def entered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x`, which is the same on all ranks of a mesh, where each goes on with a part of the work.

    Its gradient is the sum of what all ranks' parts say. Raises PeerLost, DeadlineExceeded (in the backward).
    """
    entering: Tensor = _Entered.apply(x, mesh)
    return entering


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' `x`, the same on each. Raises PeerLost, DeadlineExceeded."""
    total: Tensor = _Summed.apply(x, mesh)
    return total


def largest(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The largest of all ranks' `x`, element by element; has no gradient. Raises PeerLost, DeadlineExceeded."""
    return _over_ranks(x.detach(), mesh, dist.ReduceOp.MAX)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _over_ranks(g, ctx.mesh, dist.ReduceOp.SUM), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _over_ranks(x, mesh, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _over_ranks(x: Tensor, mesh: DeviceMesh, how: Any) -> Tensor:
    # A copy, as the gradient that came may be another node's too.
    out = x.clone(memory_format=torch.contiguous_format)
    try:
        dist.all_reduce(out, how, group=mesh.get_group())
    except RuntimeError as error:
        raise _explained(error, mesh) from None
    return out


def _explained(error: RuntimeError, mesh: DeviceMesh) -> RuntimeFailure:
    shard = f"shard {mesh.get_local_rank()} of {mesh.size()}"
    if "timed out" in str(error).lower():
        return DeadlineExceeded(
            f"{shard} waited for the others' parts of a sum for longer than the timeout; if they are just slow, "
            "give a longer one; if not, one stands still or was given other batches or calls"
        )
    return PeerLost(f"{shard} lost its connection to another while it waited for the others' parts of a sum")
