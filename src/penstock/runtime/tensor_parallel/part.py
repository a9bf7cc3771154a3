"""Which part of a parameter lies on a rank, and cutting it out."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from penstock.runtime.tensors.dtensor import as_shard

__all__ = ["shard_of", "span"]


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
