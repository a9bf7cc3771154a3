"""Stages that several ranks share, between processes: each builds the stage, and then holds a shard of it.

    stage 0 on ranks 0 1 2    every rank builds it -> all have rank 0's values -> parallelize(stage, mesh of 0 1 2)

Where nothing says how to cut the stage, every rank runs the whole of it: the same numbers, and no less work. In one
process there is one stage, and its first rank runs it for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.groups import groups_of
from penstock.runtime.mesh import Mesh
from penstock.runtime.peers import GroupPeers, Peers
from penstock.runtime.stage import Stage
from penstock.runtime.tied import Tie
from penstock.schedule import Placement

Parallelize = Callable[[nn.Module, Any], Any]
"""(stage, one-dimensional device mesh): changes a whole stage into this rank's shard of it."""


def share_stages(
    stages: Mapping[int, Stage], placement: Placement, peers: Peers, parallelize: Parallelize | None
) -> None:
    """Makes this process's stages that it shares with others one with theirs, and cuts them.

    Every process of the pipeline must call it.
    """
    if not placement.shared or not isinstance(peers, GroupPeers):
        return
    for stage, ranks in placement.shared:
        if stage in stages:
            with torch.no_grad():
                for tensor in (*stages[stage].parameters(), *stages[stage].buffers()):
                    value = peers.share(tensor.detach(), tensor.detach(), ranks[0], sorted(ranks))
                    if value is not None and peers.here[0] != ranks[0]:
                        tensor.data.copy_(value)
    if parallelize is None:
        return
    meshes = {
        ranks: dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shared",))
        for ranks, group in groups_of({ranks: ranks for _, ranks in placement.shared}, peers).items()
        if group is not None
    }
    for stage, ranks in placement.shared:
        if stage in stages:
            parallelize(stages[stage], meshes[ranks])


def cut_stages(stages: Iterable[Stage], mesh: Mesh, parallelize: Parallelize | None) -> None:
    """Makes stages this process's shards of them, where the mesh has shards; all start from the first one's values.

    Raises:
        RuntimeFailure: nothing says how to cut a stage.
    """
    if mesh.shards is None:
        return
    if parallelize is None:
        raise RuntimeFailure(
            f"the mesh has {mesh.num_shards} tensor-parallel shards of each stage, and nothing says how to cut one; "
            "give ps.Pipeline(..., parallelize=penstock.models.parallelize) for the models here, or a function of "
            "your own that takes a stage and a device mesh"
        )
    group = mesh.shards.get_group()
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            dist.broadcast(tensor.data, group=group, group_src=0)
        parallelize(stage, mesh.shards)


def require_tied_alike(ties: Sequence[Tie], placement: Placement, peers: Peers) -> None:
    """Raises RuntimeFailure where a parameter lies in a shared stage and in one that other ranks host: the ranks of
    the first would have a part of it each, and those of the other the whole.
    """
    if not isinstance(peers, GroupPeers):
        return
    for tie in ties:
        hosts = {stage: placement.hosts(0, stage) for stage in tie.stages}
        if any(len(ranks) > 1 for ranks in hosts.values()) and len(set(hosts.values())) > 1:
            where = "; ".join(f"{tie.names[s]} of stage {s} on ranks {_listed(ranks)}" for s, ranks in hosts.items())
            raise RuntimeFailure(
                f"a parameter that stages share lies on different ranks ({where}); let the same ranks share these "
                "stages, or untie them"
            )


def _listed(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
