"""Replicas that keep parameters, gradients and optimizer state in parts, by torch's FSDP2.

    before a layer's forward   its parameters are gathered from the replicas; they stay until the step ends
    backwards 0 .. N-2         add to whole gradients here
    backward N-1               adds the replicas' gradients up and leaves each its part

Weight gradients come out of autograd alone, so a split backward runs whole (I does all, W nothing).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh import Mesh
from penstock.runtime.parameters import sees_gradients
from penstock.runtime.shards import is_sharded, local
from penstock.runtime.stage import Stage
from penstock.schedule import Placement


def is_fully_sharded(stage: nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(stage, module.FSDPModule)


def shard_fully(stages: Collection[Stage], mesh: Mesh, placement: Placement, tied: Collection[str]) -> set[int]:
    """Leaves this process its part of each stage; all start from the first replica's values.

    Args:
        tied: names of parameters that several stages share. They stay whole, as does what several layers of a stage
            share, and what is one number, which FSDP2 does not take.

    Returns:
        The parameters that stay whole, by id.

    Raises:
        RuntimeFailure: several pipelines, shared stages, hooks on parameters that FSDP2 replaces, or a layer
            with parameters of several types.
    """
    if placement.num_pipelines > 1 or placement.shared:
        raise RuntimeFailure(
            'sharding="fsdp" takes stages that one rank of one pipeline runs; use "zero1", or another schedule'
        )
    from torch.distributed.fsdp import FSDPModule, fully_shard

    group = mesh.replica_mesh.get_group()
    kept: set[int] = set()
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            dist.broadcast(local(tensor.data), group=group, group_src=0)
        uses = Counter(p for layer in dict.fromkeys(stage.in_order) for p in layer.parameters())
        whole = {p for name, p in stage.named_parameters() if p.dim() == 0 or name in tied or uses[p] > 1}
        kept.update(map(id, whole))
        for name, parameter in stage.named_parameters():
            if parameter not in whole and sees_gradients(parameter):
                raise RuntimeFailure(
                    f'{name} has a hook that is to see its gradients, and sharding="fsdp" puts a part in its place, '
                    'where the hook would see none; use "zero1", or remove the hook'
                )
        for layer in dict.fromkeys(stage.in_order):
            types = sorted({str(p.dtype) for p in layer.parameters() if p not in whole})
            if len(types) > 1:
                raise RuntimeFailure(
                    f"a layer ({type(layer).__name__}) of a stage has parameters of types {', '.join(types)}, "
                    'and sharding="fsdp" keeps those of a layer as one; use "zero1", or layers of one type each'
                )
        for module in dict.fromkeys((*stage.in_order, stage)):
            if set(module.parameters()) - whole:
                fully_shard(module, mesh=mesh.replica_mesh, reshard_after_forward=False, ignored_params=whole)
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                # Losses are weighed within the whole batch, so gradients are summed.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
                part.set_reshard_after_backward(False)  # or every microbatch would gather them again
    return kept


def require_unhooked(stages: Iterable[nn.Module]) -> None:
    """Raises RuntimeFailure where a hook waits for the gradient of a part, which FSDP2 puts in place by itself."""
    for stage in stages:
        if not is_fully_sharded(stage):
            continue
        for name, parameter in stage.named_parameters():
            if is_sharded(parameter) and sees_gradients(parameter, when_added=False):
                raise RuntimeFailure(
                    f'{name} has a hook that is to see its gradients, and sharding="fsdp" adds these up without it; '
                    'use "zero1", or remove the hook'
                )


def rest(stages: Iterable[nn.Module]) -> None:
    """Gives up the other replicas' parts of parameters, which forwards gathered."""
    for stage in stages:
        for module in stage.modules():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]


def sum_after_this(stage: Any, is_last: bool) -> None:
    """Says whether the backward that follows is the last of a step, in which gradients are added up."""
    stage.set_requires_gradient_sync(is_last)
