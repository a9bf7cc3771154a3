"""Sends gradients, or values, of several tensors as one message between replicas.

    | gradient | gradient | gradient | there 1 1 1 |

The last numbers say which tensors have a gradient. So a tensor without a gradient on any replica gets none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.collective import all_reduce, broadcast, reduce, reduce_scatter
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.tensors.dtensor import as_shard, local, overwrite, placements_of, rows_per_part

BUCKET_BYTES = 25 * 2**20
"""Most bytes of a bucket, unless one tensor alone has more: large enough for a link's full speed, small enough that
the first is under way while others are being made."""

OneTensor = TypeVar("OneTensor", bound=Tensor)


def cut_into_buckets(parameters: Iterable[OneTensor], key: Callable[[OneTensor], Any]) -> list[list[OneTensor]]:
    """Parameters in groups of one type, device and `key`, in their order, each group within BUCKET_BYTES."""
    buckets: list[list[OneTensor]] = []
    open_ones: dict[Any, tuple[list[OneTensor], int]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device, key(parameter)
        size = local(parameter).numel() * parameter.element_size()
        bucket, held = open_ones.get(kind, ([], 0))
        if not bucket or held + size > BUCKET_BYTES:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_ones[kind] = bucket, held + size
    return buckets


class GradientBucket:
    """A sum that every replica gets, or only the owner of the parameters.

    Args:
        peers: the replicas. owner: the number of the replica that gets the sum; None: all get it.
    """

    def __init__(self, parameters: Sequence[Parameter], peers: GroupPeers, owner: int | None) -> None:
        self._parameters, self._peers, self._owner = parameters, peers, owner
        parts = [gradient_of(p).reshape(-1) for p in parameters] + [_there(parameters)]
        self._flat = torch.cat(parts)

    def start(self) -> Any:
        """Begins the sum; returns what to wait for."""
        if self._owner is None:
            return self._peers.start(all_reduce, self._flat)
        return self._peers.start(reduce, self._flat, self._owner)

    def unpack(self) -> None:
        """Gives the parameters what the sum gave, after the wait."""
        if self._owner not in (None, self._peers.here[0]):
            for parameter in self._parameters:
                parameter.grad = None  # what a sum towards another process left here is no one's
            return
        *parts, there = pieces(self._flat, [*(local(p).shape for p in self._parameters), (len(self._parameters),)])
        for parameter, part, found in zip(self._parameters, parts, there.tolist(), strict=True):
            if found and parameter.grad is None:
                parameter.grad = as_shard(part.clone(), parameter)
            elif found:
                local(parameter.grad).copy_(part)


class PartBucket:
    """A sum of which every replica gets the part that its optimizer steps.

        to replica 0                to replica 1
        | rows 0, 1 | there 1 1 |   | rows 2, (3) | there 1 1 |     three rows for two replicas: the last is padding

    Args:
        parameters: whole, with gradients of this replica. parts: of each the part that is kept here, which gets that
            part of the sum as its gradient. dims: the dimension along which each is cut.
    """

    def __init__(
        self, parameters: Sequence[Parameter], parts: Sequence[Parameter], dims: Sequence[int], peers: GroupPeers
    ) -> None:
        self._parts, self._dims, self._peers = parts, dims, peers
        there = _there(parameters)
        rows: list[list[Tensor]] = [[] for _ in range(peers.num_ranks)]
        self._shapes: list[Sequence[int]] = []
        for parameter, dim in zip(parameters, dims, strict=True):
            gradient = gradient_of(parameter)
            parameter.grad = None
            per_part = rows_per_part(gradient.shape[dim], peers.num_ranks)
            padded = padded_rows(gradient, dim, peers.num_ranks * per_part)
            self._shapes.append((per_part, *padded.shape[1:]))
            for row, part in zip(rows, padded.reshape(peers.num_ranks, -1), strict=True):
                row.append(part)
        whole = torch.cat([part for row in rows for part in (*row, there)])
        self._rows = as_real(whole).chunk(peers.num_ranks)
        self._mine = whole.new_empty(whole.numel() // peers.num_ranks)

    def start(self) -> Any:
        return self._peers.start(reduce_scatter, self._rows, as_real(self._mine))

    def unpack(self) -> None:
        *found, there = pieces(self._mine, [*self._shapes, (len(self._parts),)])
        for part, dim, rows, is_there in zip(self._parts, self._dims, found, there.tolist(), strict=True):
            if is_there:
                mine = rows[: local(part).shape[dim]].movedim(0, dim)
                part.grad = as_shard(mine.clone(memory_format=torch.contiguous_format), part)


def padded_rows(tensor: Tensor, dim: int, num: int) -> Tensor:
    """A tensor's rows along a dimension, which comes first then, and zeros behind them: `num` rows in all."""
    rows = tensor.movedim(dim, 0)
    padded = rows.new_zeros((num, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def pieces(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes that lie in a flat one, one after the other."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def as_real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as real numbers, for backends that only know these."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _there(parameters: Sequence[Parameter]) -> Tensor:
    """A number for each that says whether it has a gradient."""
    like = parameters[0]
    return torch.tensor([float(p.grad is not None) for p in parameters], dtype=like.dtype, device=like.device)


def gradient_of(parameter: Parameter) -> Tensor:
    """The local part of a parameter's gradient; zeros if the parameter has none.

    Raises:
        RuntimeFailure: the gradient's placement is not the parameter's.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local(parameter))
    if placements_of(gradient) != placements_of(parameter):
        raise RuntimeFailure(
            f"a gradient is placed as {placements_of(gradient)} and its parameter as {placements_of(parameter)}; let "
            "the stage's parallelize= keep both alike"
        )
    return local(gradient)


def send_values(tensors: Iterable[Any], source: Callable[[Any], int], peers: GroupPeers) -> None:
    """Gives every process the values of each tensor's source. All processes must call it for the same tensors."""
    begun: list[tuple[list[Tensor], int, Tensor, Any]] = []
    for bucket in cut_into_buckets(tensors, source):
        mine, root = [local(tensor.detach()) for tensor in bucket], source(bucket[0])
        flat = torch.cat([tensor.reshape(-1) for tensor in mine])
        begun.append((mine, root, flat, peers.start(broadcast, as_real(flat), root)))
    for mine, root, flat, work in begun:
        peers.wait_for(work, "parameters of the replica that owns them")
        if root != peers.here[0]:
            with torch.no_grad():
                for tensor, part in zip(mine, pieces(flat, [each.shape for each in mine]), strict=True):
                    overwrite(tensor, part)
