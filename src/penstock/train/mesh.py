"""The mesh of a run's processes, once they have joined."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.train.settings import Settings

NAMES = ("pp", "dp", "tp")


def mesh_of(settings: Settings) -> DeviceMesh | None:
    """Ranks, replicas and shards, by `NAMES`; None for one pipeline of whole layers. All processes must call it."""
    if settings.is_flat or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return init_device_mesh("cpu", (settings.ranks, settings.dp, settings.tp), mesh_dim_names=NAMES)
