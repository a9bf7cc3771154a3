"""Replicas that keep parameters, gradients and optimizer state in parts, by torch's FSDP2.

    a step begins      every replica gathers all parameters of its stages
    its backwards      add to whole gradients here
    REDUCE             adds a stage's gradients up over the replicas and leaves each its part
    the step ends      every replica keeps its part of the parameters alone

FSDP2 itself would gather a layer when it is called, and add its gradients up when a backward reaches it. Replicas
whose microbatches use different layers (a mixture whose expert gets no sample), or which run their ops in different
orders, would then wait for each other. So both are done for all layers at once, in one order.

A split backward runs whole (I does all, W nothing).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable

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
                part.set_requires_gradient_sync(False, recurse=False)
                part.set_reshard_after_backward(False, recurse=False)
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


def unshard(stages: Iterable[nn.Module]) -> None:
    """Gathers all parameters of the stages from the replicas, in one order on all of them."""
    for stage in stages:
        for module in stage.modules():
            if is_fully_sharded(module):
                module.unshard()  # type: ignore[operator]


def reshard(stages: Iterable[nn.Module]) -> None:
    """Gives up the other replicas' parts of parameters."""
    for stage in stages:
        for module in stage.modules():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]
