"""What does not go with what: schedules and options that are refused before anything starts, each with its reason.

schedule --require_runnable--> stages, ties --require_tied_updates, require_dense--> a pipeline
   |
   +--steered--> what may change of it while it runs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, LocalPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.pipeline_copies import require_one_copy_a_rank
from penstock.runtime.parameters.tied import Tie
from penstock.runtime.parameters.versions import rule_of
from penstock.runtime.stage.branches import is_plain, require_matching
from penstock.schedule import Schedule, ScheduleError, check


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


def require_tied_updates(schedule: Schedule, tied: Mapping[str, Sequence[int]]) -> None:
    """Raises RuntimeFailure where updates are ops and a stage can't have what it reads of a parameter that another
    one owns.

    Args:
        tied: the stages that share each tied parameter, ascending, by its names.
    """
    if schedule.updates is None:
        return
    rule = rule_of(schedule.updates.rule)
    for names, (owner, *others) in tied.items():
        if schedule.placement.shared or not is_plain(schedule):
            raise RuntimeFailure(
                f"{names} are one parameter of stages {_listed([owner, *others])}, and new values of it travel with "
                f"the forwards of a chain of stages, each on one rank, which {schedule.name} has not; untie them, "
                "or use a schedule without updates as ops"
            )
        for stage in others:
            if steps := rule.most_steps(schedule, stage):
                raise RuntimeFailure(
                    f"{names} are one parameter, and rule {rule.name!r} predicts on stage {stage} what {steps} more "
                    f"updates make of it, from the optimizer's state, which stage {owner} alone has; untie them, or "
                    "use rule 'none' or 'pipedream', which predict nothing"
                )


def require_dense(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    ties: Sequence[Tie],
    mesh: ProcessMesh,
    clip_norm: float | None,
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


def require_meshable(mesh: ProcessMesh, schedule: Schedule, steered: bool, has_conditions: bool) -> None:
    """Raises RuntimeFailure for what does not run with replicas or shards, with the reason."""
    if mesh.is_flat:
        return
    what = f"a mesh of {mesh.num_replicas} replicas and {mesh.num_shards} shards"
    if schedule.updates is not None and mesh.num_shards > 1:
        raise RuntimeFailure(
            f"{schedule.name} has its updates in the order, which keep versions of whole parameters, and {what} has "
            "parts of them; leave tp out, or use a schedule without updates as ops"
        )
    if schedule.updates is not None and mesh.sharding == "fsdp":
        raise RuntimeFailure(
            f"{schedule.name} has its updates in the order, after each of which all replicas would have to gather "
            'what it stepped, for the next op reads it; sharding="zero1" shares out the optimizer\'s state alone'
        )
    if schedule.updates is not None and mesh.sharding == "zero1":
        rule = rule_of(schedule.updates.rule)
        if any(rule.most_steps(schedule, stage) for stage in range(schedule.num_stages)):
            raise RuntimeFailure(
                f"rule {rule.name!r} predicts weights from the optimizer's state, of which each replica has a part; "
                "use sharding=\"none\", or rule 'none' or 'pipedream', which predict nothing"
            )
    if schedule.updates is not None and has_conditions and isinstance(mesh.pipeline, LocalPeers):
        raise RuntimeFailure(
            "links that are made late change when the ranks of this process take turns, and so in which order the "
            f"updates of {schedule.name} come, which all {mesh.num_replicas} replicas have to make alike; leave the "
            "links out, or give each rank a process"
        )
    if steered:
        raise RuntimeFailure(f"steering plans for one pipeline, and {what} has more; leave adapt out")


def steered(schedule: Schedule, steering: AdaptOptions | None) -> AdaptOptions | None:
    """What steering may do to a schedule. Every one is measured, and its links may be delegated. Its order is changed
    where that can be planned, and its dispatch where the order does not say which weights an op meets.
    """
    if steering is None:
        return None
    if schedule.updates is not None:
        steering = replace(steering, dispatches=())
    return replace(steering, may_replan=steering.may_replan and why_not_replanned(schedule) is None)


def why_not_replanned(schedule: Schedule) -> str | None:
    """Why no other order is planned for a schedule while it runs, in words; None where one is."""
    if schedule.updates is not None:
        return "has its updates in the order, which says which weights each op meets"
    if (num := schedule.placement.num_pipelines) > 1:
        return f"has {num} pipelines, and orders are planned for one"
    if schedule.has_shared_ops or schedule.asynchronous:
        return "has ops that several ranks run together, or that run beside others, and orders are planned for others"
    if not is_plain(schedule):
        return "has stages that branch, and orders are planned for a chain of them"
    return None
