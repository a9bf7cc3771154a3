"""Replicas that keep parameters, gradients and optimizer state in parts, by torch's FSDP2.

    before a layer's forward   its parameters are gathered from the replicas; they stay until the step ends
    backwards 0 .. N-2         add to whole gradients here
    backward N-1               adds the replicas' gradients up and leaves each its part

Weight gradients come out of autograd alone, so a split backward runs whole (I does all, W nothing).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from penstock.runtime.buckets import wait_for
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh import Mesh
from penstock.runtime.peers import GroupPeers
from penstock.runtime.shards import local
from penstock.runtime.stage import Stage
from penstock.runtime.transports.failure import explain
from penstock.schedule import Placement


def is_fully_sharded(stage: nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(stage, module.FSDPModule)


def shard_fully(stages: Collection[Stage], mesh: Mesh, placement: Placement) -> None:
    """Leaves this process its part of each stage; all start from the first replica's values.

    Raises:
        RuntimeFailure: several pipelines, or stages that ranks share.
    """
    if placement.num_pipelines > 1 or placement.shared:
        raise RuntimeFailure(
            'sharding="fsdp" takes stages that one rank of one pipeline runs; use "zero1", or another schedule'
        )
    from torch.distributed.fsdp import FSDPModule, fully_shard

    group = mesh.replica_mesh.get_group()
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            dist.broadcast(local(tensor.data), group=group, group_src=0)
        for module in (*stage.in_order, stage):
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh.replica_mesh, reshard_after_forward=False)
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                # Losses are weighed within the whole batch, so gradients are summed.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)


def sum_after_this(stage: Any, is_last: bool) -> None:
    """Says whether the backward that follows is the last of a step, in which gradients are added up."""
    stage.set_requires_gradient_sync(is_last)


class Parts:
    """What a process does with other replicas where each keeps a part of everything: FSDP2 does the rest.

    Args:
        stages: those here. peers: the processes with the same stages. timeout: seconds that any wait may last.
    """

    def __init__(self, stages: Sequence[nn.Module], peers: GroupPeers, timeout: float) -> None:
        self._stages, self._peers, self._timeout = stages, peers, timeout

    def begin(self) -> None: ...

    def start(self, stage: int) -> None: ...

    def finish(self) -> None: ...

    def share_parameters(self) -> None: ...

    def share_all(self) -> None: ...

    def share_buffers(self) -> None:
        """Gives every replica the first one's buffers (statistics, say), which each keeps for itself in a step."""
        for buffer in [buffer for stage in self._stages for buffer in stage.buffers()]:
            work = dist.broadcast(local(buffer), group=self._peers.group, group_src=0, async_op=True)
            try:
                wait_for(work, self._timeout)
            except RuntimeError as error:
                what = "statistics of the first replica"
                raise explain(error, self._peers.here[0], 0, what, self._timeout) from None

    def rest(self) -> None:
        """Gives up the other replicas' parts of parameters, which forwards gathered."""
        for stage in self._stages:
            for module in stage.modules():
                if is_fully_sharded(module):
                    module.reshard()  # type: ignore[operator]

    def owned(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        return list(parameters)

    def answers_for(self, parameter: Any) -> bool:
        return self._peers.here[0] == 0
