"""Process groups of some of the ranks of a pipeline, made by all of them in one order."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from penstock.runtime.peers import GroupPeers
from penstock.runtime.weak_group import WeakGroup
from penstock.schedule import Schedule
from penstock.schedule.text import ranks_together


def groups_of(sets: Iterable[tuple[int, ...]], peers: GroupPeers) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """For each set of ranks a group of its own; None where this process is not in it.

    Every process of the pipeline must call it, with the same sets. Waits in a group end after the peers' deadline.
    """
    own = peers.group
    members = dist.get_process_group_ranks(own)
    whole = len(members) == dist.get_world_size()
    limit = timedelta(seconds=peers.timeout)
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sorted(set(sets)):
        inside = [members[rank] for rank in ranks]
        if whole:
            group = dist.new_group(inside, timeout=limit)
        else:
            # A group that its members alone make is named after them and after how many groups they know: who is not
            # in it makes one of itself, so that all go on counting alike.
            mine = inside if dist.get_rank() in inside else [dist.get_rank()]
            group = dist.new_group(mine, timeout=limit, use_local_synchronization=True)
        made[ranks] = group if peers.here[0] in ranks and isinstance(group, dist.ProcessGroup) else None
    return made


def meeting_groups(schedule: Schedule, peers: GroupPeers) -> dict[tuple[str, int], WeakGroup]:
    """For each kind of op on a stage that several ranks run together, this one among them, their group.

    Every process of the pipeline must call it.
    """
    together = {(op.kind, op.stage): ranks for op, ranks in ranks_together(schedule).items()}
    groups = groups_of(together.values(), peers)
    found = {place: groups[ranks] for place, ranks in together.items()}
    return {place: WeakGroup(group) for place, group in found.items() if group is not None}
