"""Linear layers and embeddings that compute with this rank's shard of their weights, and what passes between ranks.

A module becomes one of these in place (`Sharding`), so what holds it goes on holding it, and its parameters keep
their names. `on_shard` is the arithmetic without any word between ranks: the split backward defers its weights.

    entered    forward: nothing                      backward: the sum of all ranks' gradients
    summed     forward: the sum of all ranks'        backward: nothing

All ranks of a mesh run the same ops in the same order, backwards included, so nothing needs a name: the next sum here
is the next one there. Each has the mesh's own deadline.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.tensors.dtensor import as_shard, local


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


def shard_of(parameter: Parameter, mesh: DeviceMesh, dim: int) -> Parameter:
    """A parameter that every rank holds in full, cut along `dim` as `torch.chunk` cuts; the whole may be freed."""
    # Imported where a shard is first made, as it takes a second.
    from torch.distributed.tensor import Shard, distribute_tensor

    cut = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return Parameter(as_shard(cut.to_local().clone(), cut), parameter.requires_grad)


def span(size: int, mesh: DeviceMesh) -> range:
    """Which of `size` rows lie on this rank; of the last ranks it may be none."""
    each = -(-size // mesh.size())
    first = min(mesh.get_local_rank() * each, size)
    return range(first, min(first + each, size))


class ShardedModule(nn.Module):
    """A module whose `forward` has some words between ranks around `on_shard`."""

    mesh: DeviceMesh

    @abstractmethod
    def on_shard(self, x: Tensor) -> Tensor:
        """What this rank's shard makes of `x`, a plain tensor."""


class ColumnLinear(ShardedModule, nn.Linear):
    """In a region: some of the output features, of input that is the same on all ranks."""

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.on_shard(x)


class RowLinear(ShardedModule, nn.Linear):
    """The end of a region: all output features, of some of the input features. All hold the bias, added once."""

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        y = summed(self.on_shard(x), self.mesh)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyLinear(ColumnLinear):
    """A head: logits of some of the vocabulary, as a DTensor of them all, which `CrossEntropy` takes as it is."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard  # there since a shard was made

        logits = self.on_shard(entered(x, self.mesh))
        shape = torch.Size((*x.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        placed = [Shard(logits.dim() - 1)]
        return DTensor.from_local(logits, self.mesh, placed, run_check=False, shape=shape, stride=stride)


class VocabularyEmbedding(ShardedModule, nn.Embedding):
    """Rows of some of the tokens; the others' are zeros here, and the sum over ranks has all."""

    @property
    def padding_here(self) -> int | None:
        """Which of this rank's rows, if any, is that of the token that stands for nothing."""
        own, padding = span(self.num_embeddings, self.mesh), self.padding_idx
        return None if padding is None or padding not in own else padding - own.start

    def on_shard(self, x: Tensor) -> Tensor:
        return F.embedding(x, local(self.weight), self.padding_here)

    def forward(self, tokens: Tensor) -> Tensor:
        own = span(self.num_embeddings, self.mesh)
        if not own:  # a small vocabulary may leave the last ranks without rows
            # A row of zeros, and not `local(self.weight).sum()`, whose gradient has strides of 0: torch 2.11 would
            # gather that shard before it adds to it, on this rank alone.
            row = F.pad(local(self.weight), (0, 0, 0, 1))
            return summed(F.embedding(torch.zeros_like(tokens), row), self.mesh)
        # A token that is on no rank stays out of range on all, for torch to refuse.
        elsewhere = (tokens < own[0]) & (tokens >= 0) | (tokens > own[-1]) & (tokens < self.num_embeddings)
        rows = self.on_shard((tokens - own[0]).masked_fill(elsewhere, 0))
        return summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.mesh)
