"""Where the stages of a graph may lie, where nobody has said it."""

from __future__ import annotations

from penstock.cost import Costs
from penstock.cost.cut import partition
from penstock.dispatch.queues import depths
from penstock.schedule import Placement, StageGraph


def candidates(costs: Costs, stages: StageGraph, num_ranks: int) -> list[Placement]:
    """Placements worth trying, each rank with at least one stage where there are as many.

    Four rules: stages in the order of their depth, cut into parts of about the same work; the same by number, so
    that each branch lies on ranks of its own; dealt to the ranks in turn, by depth; and each stage, the longest
    first, on the rank with least work so far.
    """
    num_stages = stages.num_stages
    work = [costs.f[s] + min(costs.b[s], costs.i[s] + costs.w[s]) for s in range(num_stages)]
    depth = depths(stages)
    by_depth = sorted(range(num_stages), key=lambda s: (depth[s], s))
    rows = [
        _cut(by_depth, work, num_ranks),
        _cut(list(range(num_stages)), work, num_ranks),
        _dealt_in_turn(by_depth, num_ranks),
        _packed(work, num_ranks),
    ]
    found: list[Placement] = []
    for row in rows:
        if (placement := Placement((tuple(row),))) not in found:
            found.append(placement)
    return found


def _cut(order: list[int], work: list[float], num_ranks: int) -> list[int]:
    """Stages in an order, cut into parts of about the same work."""
    row = [0] * len(order)
    for rank, part in enumerate(partition([work[stage] for stage in order], min(num_ranks, len(order)))):
        for place in part:
            row[order[place]] = rank
    return row


def _dealt_in_turn(order: list[int], num_ranks: int) -> list[int]:
    row = [0] * len(order)
    for place, stage in enumerate(order):
        row[stage] = place % num_ranks
    return row


def _packed(work: list[float], num_ranks: int) -> list[int]:
    row, load = [0] * len(work), [0.0] * num_ranks
    for stage in sorted(range(len(work)), key=lambda s: -work[s]):
        row[stage] = min(range(num_ranks), key=lambda r: (load[r], r))
        load[row[stage]] += work[stage]
    return row
