"""From a placement and its costs to the flow of one turn, and from a timed flow back to a schedule.

A turn is one microbatch of each pipeline, so that two pipelines that run against each other share a repetend.
Microbatch m goes to pipeline m mod K and is part of turn m // K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.cost import Costs, Links
from penstock.planning.limits import Limits
from penstock.planning.periodic.model import Block, Flow, Instance, Need
from penstock.schedule import Op, Placement, Schedule


@dataclass(frozen=True)
class PlacedFlow:
    """A flow and what it stands for.

    Attributes:
        flow: the blocks of one turn.
        ops: (kind, stage, pipeline) of each block.
        counts: turns that each block takes part in; the last turn is cut short where N is no multiple of K.
    """

    flow: Flow
    ops: tuple[tuple[str, int, int], ...]
    counts: tuple[int, ...]
    placement: Placement
    num_microbatches: int

    def schedule(self, timed: Iterable[Instance], num_ranks: int, memory_limit: float | None) -> Schedule:
        """The schedule in which each rank runs its ops in the order of `timed`."""
        num_pipelines = self.placement.num_pipelines
        rows: list[list[Op]] = [[] for _ in range(num_ranks)]
        for one in timed:
            kind, stage, pipeline = self.ops[one.block]
            for rank in self.flow.blocks[one.block].ranks:
                rows[rank].append(Op(kind, stage, one.turn * num_pipelines + pipeline))
        pipelines = tuple(m % num_pipelines for m in range(self.num_microbatches))
        return Schedule("plan", self.placement, tuple(map(tuple, rows)), pipelines, memory_limit)


def placed_flow(
    costs: Costs,
    placement: Placement,
    num_microbatches: int,
    links: Links,
    limits: Limits,
    split: bool,
) -> PlacedFlow:
    """The flow of `placement`, a chain of stages per pipeline; with `split`, backwards are I and W, else B."""
    blocks: list[Block] = []
    ops: list[tuple[str, int, int]] = []
    counts: list[int] = []
    stages = range(placement.num_stages)

    def add(kind: str, stage: int, pipeline: int, needed: Iterable[int]) -> int:
        ranks = placement.hosts(pipeline, stage)
        held, share = limits.held[stage]
        back = {"F": 0.0, "I": share * held, "W": (1.0 - share) * held, "B": held}[kind]
        needs = tuple(Need(b, _delay(blocks[b].ranks, ranks, links)) for b in needed)
        name = f"{stage}{kind}" + (f" of pipeline {pipeline}" if placement.num_pipelines > 1 else "")
        acquired = held if kind == "F" else 0.0
        blocks.append(Block(name, ranks, costs.duration(kind, stage), needs, acquired, back))
        ops.append((kind, stage, pipeline))
        counts.append(len(range(pipeline, num_microbatches, placement.num_pipelines)))
        return len(blocks) - 1

    for pipeline in range(min(placement.num_pipelines, num_microbatches)):
        forward: list[int] = []
        for stage in stages:
            forward.append(add("F", stage, pipeline, forward[-1:]))
        after: list[int] = []
        for stage in reversed(stages):
            after = [add("I" if split else "B", stage, pipeline, [forward[stage], *after])]
            if split:
                add("W", stage, pipeline, after)
    return PlacedFlow(Flow(tuple(blocks)), tuple(ops), tuple(counts), placement, num_microbatches)


def _delay(sources: tuple[int, ...], targets: tuple[int, ...], links: Links) -> float:
    """How late what `sources` made is on the last of `targets`: the first of them sends to ranks that lack it."""
    return max((links.delay(sources[0], target) for target in targets if target not in sources), default=0.0)
