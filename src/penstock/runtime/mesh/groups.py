"""Process groups of some of the ranks of a pipeline, made by all of them in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.weak_group import WeakGroup
from penstock.schedule import Schedule
from penstock.schedule.text import ranks_together

Key = TypeVar("Key")


def groups_of(
    sets: Mapping[Key, tuple[int, ...]], whole: dist.ProcessGroup, timeout: float, backend: str | None = None
) -> dict[Key, dist.ProcessGroup | None]:
    """For each set of ranks a group of its own; None where this process is not in it.

    Every process of the pipeline must call it, with the same sets.

    Args:
        whole: the pipeline's group. timeout: seconds after which waits in a group end.
        backend: of the groups; that of all of torch.distributed where not given.
    """
    members = dist.get_process_group_ranks(whole)
    inside = {key: [members[rank] for rank in ranks] for key, ranks in sets.items()}
    return groups_of_processes(inside, timeout, len(members) == dist.get_world_size(), backend)


def groups_of_processes(
    sets: Mapping[Key, Sequence[int]], timeout: float, whole: bool, backend: str | None = None
) -> dict[Key, dist.ProcessGroup | None]:
    """The same of sets of processes, by their numbers in all of torch.distributed.

    Args:
        whole: every process of torch.distributed calls it, with the same sets; else every process of theirs does, and
            others may have sets of their own, as many.
        backend: of the groups; that of all of torch.distributed where not given.
    """
    limit = timedelta(seconds=timeout)
    made: dict[Key, dist.ProcessGroup | None] = {}
    for key, each in sets.items():
        inside = list(each)
        is_member = dist.get_rank() in inside
        group: object = None
        if whole:
            group = dist.new_group(inside, timeout=limit, backend=backend)
        elif is_member:
            group = dist.new_group(inside, timeout=limit, backend=backend, use_local_synchronization=True)
        if not is_member:
            # A group that its members alone make is named after them and after how many groups they know. So who is
            # not in this one makes one of itself, and all go on counting alike.
            dist.new_group([dist.get_rank()], timeout=limit, use_local_synchronization=True)
        made[key] = group if is_member and isinstance(group, dist.ProcessGroup) else None
    return made


def meeting_groups(schedule: Schedule, peers: GroupPeers) -> dict[tuple[str, int], WeakGroup]:
    """For each kind of op on a stage that several ranks run together, this one among them, their group.

    Asynchronous ops have groups of their own: what they do there keeps its own order. Every process of the pipeline
    must call it.
    """
    together = {(op.kind, op.stage): ranks for op, ranks in sorted(ranks_together(schedule).items())}
    keys = {place: (ranks, place if place in schedule.asynchronous else None) for place, ranks in together.items()}
    groups = groups_of({key: key[0] for key in keys.values()}, peers.group, peers.timeout)
    found = {place: groups[key] for place, key in keys.items()}
    return {place: WeakGroup(group) for place, group in found.items() if group is not None}
