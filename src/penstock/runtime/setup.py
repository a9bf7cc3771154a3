"""What a pipeline finds when it is made: the other ranks, the device, the optimizer, the transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.cost import Costs, LinkConditions
from penstock.dispatch import Dispatch
from penstock.runtime.arguments import made_by
from penstock.runtime.copies import require_one_copy_a_rank
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.junctions import is_plain, require_matching
from penstock.runtime.peers import GroupPeers, LocalPeers, Peers
from penstock.runtime.stage import Stage
from penstock.runtime.steering import Steering
from penstock.runtime.tied import Tie
from penstock.runtime.transport_choice import TransportChoice
from penstock.schedule import Schedule, ScheduleError, check
from penstock.simulate.auto import WITHOUT_WAITING, choose_policy
from penstock.simulate.simulate import AUTO, as_dispatch

if TYPE_CHECKING:
    from penstock.runtime.mesh import Mesh


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


def dispatch_of(
    given: Dispatch | str,
    schedule: Schedule,
    costs: Costs | None,
    choice: TransportChoice,
    links: LinkConditions | None = None,
    max_held: float | Sequence[float] | None = None,
) -> Dispatch:
    """Reads a dispatch, or "auto": the fastest by simulation; of equals one that absorbs what nobody foresaw.

    Args:
        costs: of the schedule's stages; all ops take as long as each other where they are not known.
        choice: how messages travel; "nccl" runs frozen.
        links: what is known of them; no delays where not given. max_held: as in `simulate`.

    Raises:
        ScheduleError: another word, or a policy that waits.
    """
    if given != AUTO:
        dispatch = as_dispatch(given)
        if schedule.updates is not None and dispatch.is_dynamic:
            raise RuntimeFailure(
                f"{schedule.name} has its updates in the order, which says what each op meets; run it frozen"
            )
        return dispatch
    if schedule.updates is not None or choice.name == "nccl":
        return Dispatch.FROZEN
    costs = costs or Costs.assumed(schedule.num_ranks, schedule.placement)
    found = choose_policy(
        schedule,
        costs,
        links=links,
        transport=choice.simulated(()),
        max_held=max_held,
        policies=WITHOUT_WAITING,
    )
    return found.policy.dispatch


def check_once(schedule: Schedule, peers: Peers) -> None:
    """Checks the schedule; only the first rank says what is wrong, so that it is said once."""
    try:
        check(schedule)
    except ScheduleError:
        if 0 in peers.here:
            raise
        raise SystemExit(1) from None


def require_runnable(schedule: Schedule) -> None:
    """Raises RuntimeFailure, naming the feature, for schedules that are proved and simulated but not yet run."""
    require_one_copy_a_rank(schedule.placement)
    require_matching(schedule.graph, schedule.num_microbatches)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def require_untied(schedule: Schedule, ties: Sequence[Tie]) -> None:
    """Raises RuntimeFailure where updates are ops and stages share a parameter, which each would step by itself."""
    if schedule.updates is not None and ties:
        names = ", ".join(ties[0].names.values())
        raise RuntimeFailure(
            f"{names} are one parameter, and {schedule.name} updates stages {_listed(ties[0].stages)} at different "
            "times; untie them, or use a schedule without updates as ops"
        )


def require_dense(
    schedule: Schedule, stages: Mapping[int, nn.Module], ties: Sequence[Tie], mesh: Mesh, clip_norm: float | None
) -> None:
    """Raises RuntimeFailure, the same on every rank, where an embedding gives sparse gradients to what takes none."""
    mine = [
        f"{path}.weight"
        for stage in stages.values()
        for path, module in stage.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    sparse = sorted({name for part in mesh.everyone.gather(mine) for name in part})
    if not sparse:
        return
    apart = isinstance(mesh.pipeline, GroupPeers)
    tied = [name for tie in ties for name in tie.names.values() if name in sparse]
    if mesh.num_replicas > 1:
        why = f"{mesh.num_replicas} replicas add up"
    elif clip_norm is not None:
        why = "clip_norm measures"
    elif apart and tied:
        sparse, why = tied, "processes send one another, for a parameter that stages share,"
    elif apart and schedule.updates is not None and schedule.placement.num_pipelines > 1:
        why = f"the pipelines of {schedule.name} send one another at each of its updates"
    else:
        return
    raise RuntimeFailure(f"{sparse[0]} has sparse gradients, and what {why} are dense ones; give it sparse=False")


def require_steerable(schedule: Schedule, steering: Steering | None) -> None:
    """Raises RuntimeFailure where a run is to be changed by steering whose order may not change."""
    if steering is None or not steering.may_change:
        return
    if schedule.updates is not None:
        raise RuntimeFailure(
            f"{schedule.name} has its updates in the order, so nothing but that order may run; leave steering out"
        )
    if schedule.placement.num_pipelines > 1:
        raise RuntimeFailure(
            f"{schedule.name} has {schedule.placement.num_pipelines} pipelines, and steering plans for one; leave "
            "steering out"
        )
    if schedule.has_shared_ops or schedule.asynchronous:
        raise RuntimeFailure(
            f"{schedule.name} has ops that several ranks run together, or that run beside others, and steering plans "
            "for ops of one rank; leave steering out"
        )
    if not is_plain(schedule):
        raise RuntimeFailure(
            f"the stages of {schedule.name} branch, and steering plans for a chain of them; leave steering out"
        )


def device_of(stages: Iterable[Stage], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for stage in stages:
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cpu")


@contextmanager
def kept_groups(optimizer: object) -> Iterator[None]:
    """A given optimizer has the parameters that it had where what comes in here fails."""
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    before = [list(group["params"]) for group in groups]
    try:
        yield
    except BaseException:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        raise


def optimizer_of(
    given: Callable[[list[Parameter]], Optimizer] | Optimizer | None,
    parameters: list[Parameter],
    stand_ins: Mapping[int, Sequence[Parameter]] | None = None,
) -> Optimizer | None:
    """The optimizer over this process's parameters.

    Args:
        stand_ins: by the id of a parameter that a given optimizer has, those that it is to have instead.
    """
    if given is None:
        return None
    if isinstance(given, Optimizer):
        if given.state and stand_ins:
            raise RuntimeFailure("the optimizer has stepped already; give a new one, or a function that makes one")
        own = {id(p) for p in parameters}
        for group in given.param_groups:
            named = [one for p in group["params"] for one in (stand_ins or {}).get(id(p), (p,))]
            group["params"] = [p for p in named if id(p) in own]
        return given
    if parameters:
        return made_by(given, parameters)
    # A rank whose stages have no parameters: the user's learning-rate schedule still wants an optimizer.
    empty = made_by(given, [Parameter(torch.zeros(0))])
    for group in empty.param_groups:
        group["params"] = []
    return empty
