"""What a pipeline finds in its surroundings when it is made: the other ranks, the device, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.peers import GroupPeers, LocalPeers, Peers
from penstock.runtime.stage import Stage


def peers_of(mesh: Any, num_ranks: int, timeout: float) -> Peers:
    """The ranks to run over: the mesh's, torch.distributed's where it is set up, or all in this process."""
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    if group is None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return LocalPeers(num_ranks)
        group = dist.group.WORLD
    size = dist.get_world_size(group)
    if size != num_ranks:
        raise RuntimeFailure(
            f"the schedule is for {num_ranks} ranks and the process group has {size}; build it with "
            f"num_ranks={size} or start {num_ranks} processes"
        )
    return GroupPeers(group, timeout)


def device_of(stages: Mapping[int, Stage], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for stage in stages.values():
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cpu")


def optimizer_of(
    given: Callable[[list[Parameter]], Optimizer] | Optimizer | None, parameters: list[Parameter]
) -> Optimizer | None:
    """The optimizer over this process's parameters."""
    if given is None:
        return None
    if isinstance(given, Optimizer):
        own = {id(p) for p in parameters}
        for group in given.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in own]
        return given
    if parameters:
        return given(parameters)
    # A rank whose stages have no parameters: the user's learning-rate schedule still wants an optimizer.
    empty = given([Parameter(torch.zeros(0))])
    for group in empty.param_groups:
        group["params"] = []
    return empty
