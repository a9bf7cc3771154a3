"""Grids of programs: FlexPipe's (placement, kinds, forward traversal, backward traversal), and a wider one.

Each point is run through time by the compiled decision core over the real costs and under the memory there is, with
whole backwards, of which the best have their gradients separated later (`search.py`), and once more with split ones,
W in the bubbles. Backwards of shared stages stay whole.

    PAPER    its Table 2 and section 6: no intervals but on circular placements, no forward-first
    WIDER    besides: BitPipe's placement, waves, what has waited longest or the lowest microbatch first, and limits
             on the microbatches in flight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import penstock as ps
from experiments.flexpipe.setups import Setup
from penstock.program.rules import Traversal
from penstock.simulation.lister import Lister

BOTH = "+bidirectional"
KEPT = 3
COMPILE_ABOVE = 20_000
"""Ops in a whole grid above which compiled code pays."""


@dataclass(frozen=True)
class Grid:
    """Which points there are.

    Attributes:
        shapes: names of placements, as `placements` takes them.
        wider: whether traversals and limits beyond the paper's join in.
    """

    shapes: tuple[str, ...]
    wider: bool = False

    def placements(self, num_ranks: int, num_blocks: int) -> Iterator[tuple[str, ps.Placement]]:
        """Those that cut the blocks into equal stages, with shared ends."""
        for shape in self.shapes:
            plain = _plain(shape.removesuffix(BOTH), num_ranks)
            if plain is None or num_blocks % plain.num_stages:
                continue
            placement = ps.placements.bidirectional(plain) if shape.endswith(BOTH) else plain
            yield shape, ps.placements.shared_ends(placement)

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

    def best(
        self, shape: str, placement: ps.Placement, setup: Setup, costs: ps.Costs, room: float, below: float = inf
    ) -> list[ps.Schedule]:
        """The shortest schedules, `KEPT` with whole backwards and one with split ones.

        Args:
            room: bytes of activations that a rank may hold.
            below: ms that each must stay under.
        """
        last, n = placement.num_stages - 1, setup.num_microbatches
        points = [replace(rules, memory_limit=room) for rules in self.rules(shape, placement, n)] if room > 0 else []
        found: list[ps.Schedule] = []
        for split, most in ((False, KEPT), (lambda stage: 0 < stage < last, 1)):
            if split and setup.recompute == "full":
                break
            programs = [
                ps.Program(placement, n, rules, split, costs, setup.links, name="searched") for rules in points
            ]
            listed = sorted(_listed(programs, below), key=lambda pair: pair[0])
            found += [program.build() for _, program in listed[:most]]
        return found


def _listed(programs: Sequence[ps.Program], below: float) -> Iterator[tuple[float, ps.Program]]:
    """Those that run to their end in less than `below` ms, with the time they take; of equal ones the first."""
    lister: Lister | None = None
    seen: set[float] = set()
    for program in programs:
        if lister is None:
            graph = program.queues()
            lister = Lister(graph, compile=True if graph.num_ops * len(programs) > COMPILE_ABOVE else None)
        try:
            listed = lister.list_by_rules(program.tables(lister.graph))
        except ps.ScheduleError:  # less room than one microbatch needs
            continue
        if listed.complete and listed.makespan < below and listed.makespan not in seen:
            seen.add(listed.makespan)
            yield listed.makespan, program


def _plain(shape: str, num_ranks: int) -> ps.Placement | None:
    if shape == "one-to-one":
        return ps.placements.one_to_one(num_ranks)
    if shape == "circular":
        return ps.placements.circular(num_ranks, 2 * num_ranks)
    if shape == "v-shape":
        return ps.placements.v_shape(num_ranks)
    return ps.placements.wave(num_ranks, 2)


PAPER = Grid(("one-to-one", "circular", "v-shape", "one-to-one" + BOTH, "v-shape" + BOTH))
WIDER = Grid((*PAPER.shapes, "circular" + BOTH, "wave", "wave" + BOTH), wider=True)
