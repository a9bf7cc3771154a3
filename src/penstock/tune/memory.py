"""How many bytes each rank needs: weights, gradients, optimizer state, activations and messages.

Activations follow the order of the rank's ops. F adds what the stage keeps of a microbatch; B takes it away; I
leaves only what W still needs:

    bytes   activation +---- F ----+
                       |           +---- I ----+  held
                       |                       +---- W ----  0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.cost import Costs
from penstock.engine.memory import peaks
from penstock.formats.profile import Profile
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.updates import OWNER
from penstock.simulation.memory_footprint import RankFootprint, footprint

POSTED = 2
"""Buffers that the runtime keeps at each end of each channel of messages."""


def memory_of(schedule: Schedule, cut: Sequence[range], profile: Profile) -> list[RankFootprint]:
    """Each rank's bytes at its fullest moment; `cut[stage]` are the layers of a stage.

    A weight that two layers share counts at each stage that holds one of them, as each keeps a copy. If several
    pipelines have copies of a stage, what the optimizer keeps counts only at the owner, which makes the updates. For
    a stage that ranks share, the profile says what a rank's part is. If updates are ops of the schedule, versions of
    the weights, gradients of two windows and the state of a PREDICT count as in `ps.footprint`.
    """
    kept = [profile.total("activation", layers) for layers in cut]
    held = [profile.total("held", layers) for layers in cut]
    found, graph = [], schedule.graph
    for rank, row in enumerate(schedule.order):
        stages = schedule.stages_of(rank)
        weights = sum(profile.total("weight", cut[stage]) for stage in stages)
        owned = owned_by(schedule.placement, rank)
        state = sum(profile.total("state", cut[stage]) for stage in owned)
        if profile.tied and {0, len(cut) - 1} <= set(owned):  # the head has no weight of its own
            stepped = sum(profile.total("weight", cut[stage]) for stage in owned)
            state -= profile.tied * (state / stepped if stepped else 0.0)
        if profile.tied and {0, len(cut) - 1} <= set(stages):
            weights -= profile.tied
        remote = 0.0
        for edge in graph.edges if schedule.num_ranks > 1 else ():
            remote += _num_channels(schedule.placement, edge, rank, stages) * profile.output[cut[edge[0]][-1]]
        found.append(
            RankFootprint(
                weights,
                versions=0.0,
                gradients=weights,
                optimizer=state,
                activations=peak_bytes(row, kept, held) + (profile.transient if row else 0.0),
                messages=POSTED * remote,
            )
        )
    if schedule.updates is None:
        return found
    totals = {name: [profile.total(name, layers) for layers in cut] for name in ("weight", "state")}
    costs = replace(Costs.uniform(len(cut)), weight_bytes=totals["weight"], optimizer_bytes=totals["state"])
    return [
        mine._replace(versions=more.versions, gradients=more.gradients, optimizer=more.optimizer)
        for mine, more in zip(found, footprint(schedule, costs).ranks, strict=True)
    ]


def owned_by(placement: Placement, rank: int) -> list[int]:
    """The stages that a rank updates. If several pipelines have copies of a stage, only the owner does."""
    return [stage for stage in range(placement.num_stages) if rank in placement.hosts(OWNER, stage)]


def _num_channels(placement: Placement, edge: tuple[int, int], rank: int, stages: Sequence[int]) -> int:
    """Channels that a rank has for messages between two stages: activations in one direction, and gradients of the
    same size in the other. A message for ranks that share a stage goes to each of them that has not made it itself.
    """
    hosts = [placement.hosts(OWNER, stage) for stage in edge]
    if max(map(len, hosts)) == 1:
        return 2 * sum(stage in stages for stage in edge)
    found = 0
    for makers, takers in (hosts, hosts[::-1]):
        others = [taker for taker in takers if taker not in makers]
        found += len(others) if rank == makers[0] else int(rank in others)
    return found


def peak_bytes(row: Sequence[Op], kept: Sequence[float], held: Sequence[float]) -> float:
    """Most bytes of activations a rank holds when it runs its ops in this order."""
    changes = {
        "F": kept,
        "B": [-one for one in kept],
        "I": [left - one for left, one in zip(held, kept, strict=True)],
        "W": [-left for left in held],
    }
    return peaks([changes[op.kind][op.stage] if op.kind in changes else 0.0 for op in row], [0, len(row)])[0]
