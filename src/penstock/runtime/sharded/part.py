"""The part of a parameter that lies here, and tensors laid beside it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

__all__ = ["local", "put_on", "shard_of", "span"]


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor: of a DTensor its shard, through which gradients flow; else the tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def put_on(part: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of something laid out as `whole` is: a gradient that was computed from `local(whole)`."""
    if not isinstance(whole, DTensor) or isinstance(part, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def shard_of(parameter: Parameter, mesh: DeviceMesh, dim: int) -> Parameter:
    """A parameter that every rank holds in full, cut along `dim` as `torch.chunk` cuts; the whole may be freed."""
    data = parameter.detach()
    cut = distribute_tensor(data, mesh, [Shard(dim)], src_data_rank=None)
    own = cut.to_local().clone()
    return Parameter(put_on(own, cut), parameter.requires_grad)


def span(size: int, mesh: DeviceMesh) -> range:
    """Which of `size` rows lie on this rank; of the last ranks it may be none."""
    each = -(-size // mesh.size())
    first = min(mesh.get_local_rank() * each, size)
    return range(first, min(first + each, size))
