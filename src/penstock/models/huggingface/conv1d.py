"""Shards of GPT-2's linear layers, which transformers calls Conv1D: a weight is [in, out], the other way round.

The attention's is query, key and value side by side, [in, 3 D]. Consecutive columns of it are no whole heads, so this
weight stays whole on every rank, under its shape; each computes with the columns of its heads alone:

    weight   q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
    rank 1         q2 q3         k2 k3         v2 v3
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.runtime.tensor_parallel import ShardedModule, entered, summed
from penstock.runtime.tensors.dtensor import local

__all__ = ["ColumnConv1D", "FusedConv1D", "RowConv1D"]


class ColumnConv1D(ShardedModule):
    """In a region: some of the output features."""

    weight: Tensor
    bias: Tensor

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight).T, local(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.on_shard(x)


class RowConv1D(ShardedModule):
    """The end of a region: some of the input features."""

    weight: Tensor
    bias: Tensor

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight).T)

    def forward(self, x: Tensor) -> Tensor:
        y = summed(self.on_shard(x), self.mesh)
        return y + self.bias.to(y.dtype)


class FusedConv1D(ShardedModule):
    """In a region: query, key and value of some of the heads, of a weight that every rank holds in full."""

    weight: Tensor
    bias: Tensor

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, self._columns(self.weight).T, self._columns(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.on_shard(x)

    def _columns(self, whole: Tensor) -> Tensor:
        """[..., 3 D] to [..., 3 D/n]; the gradients of all ranks' columns make that of the whole."""
        apart = entered(whole, self.mesh).unflatten(-1, (3, self.mesh.size(), -1))
        return apart.select(-2, self.mesh.get_local_rank()).flatten(-2)
