"""Stages that several ranks share, between processes: each builds the stage, and then holds a shard of it.

    stage 0 on ranks 0 1 2    every rank builds it -> all have rank 0's values -> parallelize(stage, mesh of 0 1 2)
    with two shards of each   all six processes hold a part of stage 0, and two of them a part of stage 1 each

Where nothing says how to cut the stage, every rank runs the whole of it: the same numbers, and no less work. In one
process there is one stage, and its first rank runs it for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, groups_of, groups_of_processes
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.stage.stage import Stage
from penstock.schedule import Placement

Parallelize = Callable[[nn.Module, Any], Any]
"""(stage, one-dimensional device mesh): changes a whole stage into this rank's shard of it."""


def cut_stages(
    stages: Mapping[int, Stage],
    placement: Placement,
    mesh: ProcessMesh,
    parallelize: Parallelize | None,
    device: torch.device,
) -> None:
    """Makes stages this process's shards of them: over the mesh's shards, over the ranks that share a stage, or over
    both where there are both. All processes with a stage start from the first one's values.

    Args:
        stages: each once. A module that lies in several is cut in each of them.
        device: on which stages will lie.

    Raises:
        RuntimeFailure: nothing says how to cut a stage.
    """
    if mesh.shards is not None:
        if parallelize is None:
            raise RuntimeFailure(
                f"the mesh has {mesh.num_shards} tensor-parallel shards of each stage, and nothing says how to cut "
                "one; give ps.ParallelOptions(parallelize=penstock.models.parallelize) for the models here, or a "
                "function of your own that takes a stage and a device mesh"
            )
        _part(stages)
        for stage in stages.values():
            for tensor in (*stage.parameters(), *stage.buffers()):
                dist.broadcast(tensor.data, group=mesh.shards.get_group(), group_src=0)
    if parallelize is None:
        return
    over = _meshes_of_shared(placement, mesh, device.type)
    for index, stage in stages.items():
        if (across := over.get(index, mesh.shards)) is not None:
            parallelize(stage, across)


def _meshes_of_shared(placement: Placement, mesh: ProcessMesh, device_type: str) -> dict[int, Any]:
    """By stage that ranks of the pipeline share, the device mesh of all processes that hold it, this one included."""
    peers = mesh.pipeline
    if not placement.shared or not isinstance(peers, GroupPeers):
        return {}
    sets = {ranks: ranks for _, ranks in placement.shared}
    if mesh.shards is None:
        groups = groups_of(sets, peers.group, peers.timeout)
    else:
        # A row per rank: the processes that hold its other stages together.
        rows = peers.gather(dist.get_process_group_ranks(mesh.shards.get_group()))
        inside = {ranks: [process for rank in ranks for process in rows[rank]] for ranks in sets}
        groups = groups_of_processes(inside, peers.timeout, whole=False)
    kind = device_type if mesh.shards is None else mesh.shards.device_type
    meshes = {
        ranks: dist.device_mesh.DeviceMesh.from_group(group, kind, mesh_dim_names=("shared",))
        for ranks, group in groups.items()
        if group is not None
    }
    return {stage: meshes[ranks] for stage, ranks in placement.shared if ranks in meshes}


def _part(stages: Mapping[int, Stage]) -> None:
    """Gives each stage modules of its own: what an earlier one has too is copied, its parameters tied by name."""
    seen: set[int] = set()
    for _, stage in sorted(stages.items()):
        copies: dict[int, Any] = {}
        for module in list(_known(stage, seen)):
            stage.replace(module, copy.deepcopy(module, copies))
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = copies.get(id(parameter), parameter)
        seen.update(id(module) for module in stage.modules())


def _known(module: nn.Module, seen: Collection[int]) -> Iterator[nn.Module]:
    """The modules below one that are among those seen, but none below these."""
    for child in module.children():
        if id(child) in seen:
            yield child
        else:
            yield from _known(child, seen)
