"""Repetends without a solver: in each round the ranks meet for the ops of all, then each packs its own.

    rank 0   | E H h e F B B B | E H h e F B B B |
    rank 1   | E H h e B B B F | E H h e B B B F |       one rank's F can feed the next rank's in the same round

Positions come first, from the order in which each rank packs its blocks; then every block takes the first
round in which its needs are met. Where all shared blocks are shared by all ranks, the round is as long as the
rank with most work needs, which is the shortest period there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from penstock.engine.tolerance import EPSILON
from penstock.planning.periodic.model import Flow, Repetend


def rounds(flow: Flow) -> Iterator[Repetend]:
    """One repetend for each way to pack: needs first, needs last, and the two by turns, begun with either."""
    ways: tuple[Callable[[int], bool], ...] = (
        lambda rank: False,
        lambda rank: True,
        lambda rank: rank % 2 == 0,
        lambda rank: rank % 2 == 1,
    )
    for backwards in ways:
        yield packed(flow, backwards)


def packed(flow: Flow, backwards: Callable[[int], bool]) -> Repetend:
    """The repetend in which a rank packs its blocks needs first, or needs last where `backwards(rank)`."""
    filled = [0.0] * flow.num_ranks
    positions = [0.0] * len(flow.blocks)

    def place(b: int) -> None:
        ranks = flow.blocks[b].ranks
        positions[b] = max(filled[rank] for rank in ranks)
        for rank in ranks:
            filled[rank] = positions[b] + flow.blocks[b].duration

    # The more ranks a block has, the more of them would wait for it; so those that most share go first.
    widths = sorted({len(block.ranks) for block in flow.blocks if len(block.ranks) > 1}, reverse=True)
    for width in widths:
        for b, block in enumerate(flow.blocks):
            if len(block.ranks) == width:
                place(b)
    for rank, row in enumerate(flow.on_rank):
        for b in reversed(row) if backwards(rank) else row:
            if len(flow.blocks[b].ranks) == 1:
                place(b)
    period = max(filled)
    starts: list[float] = []
    for b, block in enumerate(flow.blocks):
        ready = max((starts[n.block] + flow.blocks[n.block].duration + n.delay for n in block.needs), default=0.0)
        late = math.ceil((ready - positions[b]) / period - EPSILON) if period > 0 else 0
        starts.append(positions[b] + max(late, 0) * period)
    return Repetend(flow, period, tuple(starts))
