"""Grids of programs: FlexPipe's (placement, kinds, forward traversal, backward traversal), and a wider one.

They are searched by `penstock.planning.search_space`, as `penstock tune` searches its own: each point is run through
time over the real costs and under the memory there is, with whole backwards, of which the best have their gradients
separated later (`search.py`), and once more with split ones, W in the bubbles. Backwards of shared stages stay whole.

    PAPER    its Table 2 and section 6: no intervals but on circular placements, no forward-first
    WIDER    besides: BitPipe's placement, waves, what has waited longest or the lowest microbatch first, and limits
             on the microbatches in flight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf

import penstock as ps
from experiments.flexpipe.setups import Setup
from penstock.planning.programs import Found, placements_of, search_space
from penstock.program.rules import Traversal

BOTH = "+bidirectional"
KEPT = 3


@dataclass(frozen=True)
class Grid:
    """Which points there are.

    Attributes:
        shapes: names of placements, as `penstock.planning` has them.
        wider: whether traversals and limits beyond the paper's join in.
    """

    shapes: tuple[str, ...]
    wider: bool = False

    def placements(self, num_ranks: int, num_blocks: int) -> Iterator[tuple[str, ps.Placement]]:
        """Those that cut the blocks into equal stages, with shared ends."""
        there = {} if num_blocks % num_ranks else placements_of(num_ranks, num_blocks, shared_ends=True)
        yield from ((shape, there[shape]) for shape in self.shapes if shape in there)

    def rules(self, shape: str, placement: ps.Placement, num_microbatches: int) -> Iterator[ps.Rules]:
        """The points of one placement."""
        num_ranks = len(set(placement.pipelines[0]))
        depths: list[Traversal] = [ps.breadth_first(), ps.depth_first()]
        if shape.startswith("circular"):
            depths += [ps.breadth_first(num_ranks), ps.depth_first(num_ranks)]
        pairs = list(product(depths, depths))
        limits: list[float | None] = [None]
        if self.wider:
            pairs += [(pick(), pick()) for pick in (ps.program.earliest_first, ps.program.by_microbatch)]
            a_rank = placement.num_pipelines * (placement.num_stages - 2) / num_ranks
            limits += [a_rank * most for k in (2, 3, 4, 6) if (most := num_ranks * k / 2) < num_microbatches]
        for kinds, (forward, backward), most in product(("backward-first", "interleaved"), pairs, limits):
            yield ps.Rules(kinds, forward=forward, backward=backward, max_in_flight=most)

    def best(self, shape: str, setup: Setup, room: float, below: float = inf) -> list[Found]:
        """The shortest programs on a placement, `KEPT` with whole backwards and one with split ones.

        Args:
            room: bytes of activations that a rank may hold.
            below: ms that each must stay under.
        """
        if room <= 0:
            return []
        parts = setup.ends_shared(setup.model.num_blocks)
        last = placements_of(setup.pp, setup.model.num_blocks, shared_ends=True)[shape].num_stages - 1

        def found(split: bool, keep: int) -> list[Found]:
            try:
                outcome = search_space(
                    parts,
                    setup.pp,
                    setup.num_microbatches,
                    links=setup.links,
                    memory_limit=room,
                    shapes=[shape],
                    shared_ends=True,
                    split=(lambda stage: 0 < stage < last) if split else False,
                    rules=self.rules,
                    keep=keep,
                    below=below,
                )
            except ps.ScheduleError:  # less room than one microbatch needs
                return []
            return list(outcome.found)

        return [*found(False, KEPT), *(found(True, 1) if setup.recompute != "full" else [])]


PAPER = Grid(("one-to-one", "circular", "v-shape", "one-to-one" + BOTH, "v-shape" + BOTH))
WIDER = Grid((*PAPER.shapes, "circular" + BOTH, "wave", "wave" + BOTH), wider=True)
