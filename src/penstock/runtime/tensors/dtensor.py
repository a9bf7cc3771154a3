"""Tensors that are shards of larger ones (DTensor): the part here, the whole, and a shard cut from a whole.

Nothing here imports torch.distributed.tensor: where nothing else has, there are no such tensors.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import Parameter


def is_sharded(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placements_of(tensor: Any) -> tuple[Any, ...]:
    """How a tensor lies over the mesh it is sharded on; empty where it is whole."""
    return tuple(tensor.placements) if is_sharded(tensor) else ()


def local(tensor: Any) -> Tensor:
    """What lies in this process; it shares its memory."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def memory(tensor: Tensor) -> Tensor:
    """What lies in this process, on the same memory, with a version counter of its own: writing there is no change of
    what autograd has saved.
    """
    return local(tensor.detach()).data


def standing_for(parameter: Parameter, values: Tensor) -> Parameter:
    """Makes a parameter of these values that stands for another one. It has the attributes that were set on that, by
    which a user's function may put parameters into groups.
    """
    other = Parameter(values, parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    return other


def overwrite(target: Tensor, value: Tensor) -> None:
    """Gives a tensor here other values. Where it was expanded, a place that stands for many is written once."""
    unexpanded(target, target).copy_(unexpanded(value, target))


def unexpanded(tensor: Tensor, like: Tensor) -> Tensor:
    """The first along each dimension in which `like` was expanded: there one place in memory stands for many."""
    for dim, stride in enumerate(like.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and like.shape[dim] > 1 else tensor
    return tensor


def whole(tensor: Any) -> Tensor:
    """The whole tensor. Every process that has a shard of it must call this, in the same order."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def laid_like(tensor: Any, like: Any) -> Any:
    """A tensor as `like` lies over the mesh. Where it lies otherwise, every process that has a part must call it."""
    if not is_sharded(tensor) or placements_of(tensor) == placements_of(like):
        return tensor
    return tensor.redistribute(placements=like.placements)


def own_shard(full: Tensor, like: Any) -> Tensor:
    """Of a whole tensor the shard that `like` would have here, with memory of its own, so that the whole may go. If
    `like` is whole, the tensor itself. Nothing is sent.
    """
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    here = full.to(like.to_local().device)
    part = distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
    return as_shard(local(part).clone(), part)


def as_shard(part: Tensor, like: Any) -> Tensor:
    """A local part as a shard, where `like` is one."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def rows_per_part(num: int, num_parts: int) -> int:
    """How many of `num` rows a part has at most, as DTensor cuts them and `torch.chunk`."""
    return -(-num // num_parts)


def rows_of_part(num: int, num_parts: int, part: int) -> range:
    """Which of `num` rows a part has; of the last parts it may be fewer than others have, or none."""
    each = rows_per_part(num, num_parts)
    first = min(part * each, num)
    return range(first, min(first + each, num))
