"""Re-ranking: which node runs which rank of which replica, chosen by the iteration time that comes of it.

A slow link costs most where gradients cross it, less between two ranks of a pipeline, and nothing where it serves
nobody (`Mesh.use`). So moving a few nodes may be all that a slow link needs:

    rank 0   rank 1   rank 2                   rank 0   rank 1   rank 2
      0 ------ 2 ------ 4                        0 ------ 1 ------ 4          0:1 is late. It was in the ring of
      :        :        :       1 <-> 2          :        :        :          rank 0 and joins ranks 0 and 1 now,
      1 ------ 3 ------ 5                        2 ------ 3 ------ 5          where a schedule can absorb it

The simulator says what a placement takes, its rings included, and under which schedule, dispatch and delegates it is
best. PipeMorph (section 6) and FALCON (arXiv 2410.12588) move a slow link under PP as a rule.

Nodes whose links are all alike may stand for each other, so only the others, k of n, are placed: n! / (n - k)!
placements. Where these are too many, swaps are tried for as long as one helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from random import Random

from penstock.control.candidate import Measured, candidates, late_links
from penstock.control.configuration import Configuration, Job
from penstock.control.errors import ControlError
from penstock.control.mesh_times import MeshTimes, PlacementKind
from penstock.cost import Links
from penstock.cost.mesh import Mesh
from penstock.cost.ring import Ring
from penstock.engine.tolerance import EPSILON

EXHAUSTIVE = 20_000
"""Placements up to which all are tried."""
KICKS, SWAPS_A_KICK = 4, 3
"""Of the search by swaps: how often it starts again, and how many random swaps away from the best it does."""
ABSORBED = 24
"""Kinds of placements for which other schedules are tried; the best ones under what runs now."""


@dataclass(frozen=True)
class Moving:
    """What moving state costs.

    Attributes:
        state_bytes: bytes of parameters and optimizer state of each rank.
        bandwidth: bytes per second of a link.
        num_iterations: iterations over which the move must pay.

    Raises:
        ControlError: numbers that make no sense.

    Examples:
        >>> import penstock as ps
        >>> moving = ps.control.Moving(state_bytes=(6e6, 6e6), bandwidth=1e9, num_iterations=100)
        >>> 1000 * moving.state_bytes[0] / moving.bandwidth
        6.0
    """

    state_bytes: tuple[float, ...]
    bandwidth: float
    num_iterations: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.num_iterations > 0 and all(each >= 0 for each in self.state_bytes)):
            raise ControlError(f"{self}: give bytes of at least 0, a bandwidth and iterations above 0")

    def ms(self, now: Mesh, then: Mesh) -> float:
        """How long it takes: each node fetches its new rank's state, one after the other from each that has it."""
        if len(self.state_bytes) != now.pp:
            raise ControlError(f"state_bytes has {len(self.state_bytes)} entries; give one per rank, {now.pp} in all")
        wanted = [rank for _, rank in now.fetching(then)]
        loads = [math.ceil(wanted.count(rank) / now.dp) * self.state_bytes[rank] for rank in set(wanted)]
        return max(loads, default=0.0) / self.bandwidth * 1e3


@dataclass(frozen=True)
class Reranking:
    """What to do about the links of a mesh.

    Attributes:
        mesh: where the nodes are to lie.
        configuration: what every replica is to run there.
        ms_now: predicted iteration time as things are, in ms.
        ms_moved: predicted iteration time (ms) if nodes move and nothing else changes.
        ms_then: predicted iteration time (ms) if nodes move and the configuration changes.
        moving_ms: what moving takes, in ms, where it was asked for.
        moved: the nodes that are to lie elsewhere.
        fetching: pairs of a node and the rank whose state it needs.
        num_tried: placements that were tried.
        exhaustive: whether these were all placements.

    Examples:
        >>> import penstock as ps
        >>> costs, mesh, zb = ps.cost.costs_preset("gpt2-7b"), ps.Mesh(pp=4, dp=2), ps.build("zb", 4, 12)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job, late = ps.control.Job(costs, start), ps.Links.parse("6:7=latency:30ms+bandwidth:50GB/s")
        >>> found = ps.control.rerank(job, mesh, late)
        >>> found.ms_then <= found.ms_now, found.moved
        (True, (5, 7))
    """

    mesh: Mesh
    configuration: Configuration
    ms_now: float
    ms_moved: float
    ms_then: float
    moving_ms: float
    moved: tuple[int, ...]
    fetching: tuple[tuple[int, int], ...]
    num_tried: int
    exhaustive: bool


def rerank(
    job: Job,
    mesh: Mesh,
    links: Links,
    *,
    ring: Ring | None = None,
    now: Configuration | None = None,
    absorb: bool = True,
    allowed: Callable[[Mesh], bool] | None = None,
    moving: Moving | None = None,
    exhaustive_up_to: int = EXHAUSTIVE,
) -> Reranking:
    """The placement of nodes, and what to run on it, with the least predicted iteration time.

    It is never slower than staying. Among equals the one that moves the fewest nodes wins, then the one that moves
        the fewest states.

    Args:
        job: costs, memory, and what may be changed.
        mesh: where nodes lie now.
        links: between nodes, as measured.
        ring: how rings move bytes; the default of `simulate_mesh` where not given.
        now: what runs now; the job's start where not given.
        absorb: whether the schedule, its dispatch and delegated links may change too.
        allowed: says of a placement whether it counts; all count where not given. Staying always does.
        moving: charges a placement for the state that it moves.
        exhaustive_up_to: up to so many placements all are tried; with more, swaps.

    Raises:
        ScheduleError, CostError: what `simulate_mesh` refuses.

    Examples:
        >>> import penstock as ps
        >>> costs, mesh, zb = ps.cost.costs_preset("gpt2-7b"), ps.Mesh(pp=4, dp=2), ps.build("zb", 4, 12)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job, late = ps.control.Job(costs, start), ps.Links.parse("6:7=latency:30ms+bandwidth:50GB/s")
        >>> found = ps.control.rerank(job, mesh, late)
        >>> print(found.mesh, found.moved, round(found.ms_now), round(found.ms_then))
        0 2 4 6 | 1 3 7 5 (5, 7) 3653 337
    """
    now = now or job.start
    times = MeshTimes(job, mesh, links, ring)
    search = _MeshSearch(times, mesh, now, moving)
    tried, exhaustive = search.placements(allowed, exhaustive_up_to)
    best = {mesh: (search.cost(mesh), now)}
    least = min(tried, key=search.rank, default=mesh)
    best[least] = (search.cost(least), now)
    if absorb:
        firsts: dict[PlacementKind, Mesh] = {times.kind(mesh): mesh}
        for each in sorted(tried, key=search.rank):
            firsts.setdefault(times.kind(each), each)
        for kind, each in list(firsts.items())[: ABSORBED + 1]:
            configuration = absorbing(times, kind, now)
            best[each] = (search.cost(each, configuration), configuration)
    chosen = min(best, key=lambda each: (_rounded(best[each][0], best[mesh][0]), *search.ties(each)))
    configuration = best[chosen][1]
    return Reranking(
        chosen,
        configuration,
        ms_now=times.iteration(mesh, now),
        ms_moved=times.iteration(chosen, now),
        ms_then=times.iteration(chosen, configuration),
        moving_ms=0.0 if moving is None else moving.ms(mesh, chosen),
        moved=mesh.moved(chosen),
        fetching=mesh.fetching(chosen),
        num_tried=len(tried),
        exhaustive=exhaustive,
    )


def absorbing(times: MeshTimes, kind: PlacementKind, now: Configuration) -> Configuration:
    """What every replica best runs on placements of a kind, of all `candidates`; `now` if nothing is better."""
    job, links = times.job, times.worst_links(kind)
    late = late_links(dict(links.delays), job.smallest_delay)
    ways = candidates(job, now, Measured.steady(links, late))
    least = times.of_kind(kind, now) * (1 - job.least_gain)
    best = now
    for way in sorted(ways, key=lambda each: (each.price, len(each.configuration.delegated))):
        ms = times.of_kind(kind, way.configuration)
        if ms < least * (1 - EPSILON):
            least, best = ms, way.configuration
    return best


def _rounded(ms: float, unit: float) -> int:
    """Times apart by less than can matter are the same."""
    return round(ms / (unit or 1.0) / EPSILON)


class _MeshSearch:
    """Placements of nodes, ranked by what an iteration takes under what runs now."""

    def __init__(self, times: MeshTimes, mesh: Mesh, now: Configuration, moving: Moving | None) -> None:
        self._times, self._mesh, self._now, self._moving = times, mesh, now, moving
        self._unit = times.iteration(mesh, now)

    def cost(self, mesh: Mesh, configuration: Configuration | None = None) -> float:
        """Milliseconds an iteration, and the share that it bears of moving there."""
        moving = self._moving
        share = 0.0 if moving is None else moving.ms(self._mesh, mesh) / moving.num_iterations
        return self._times.iteration(mesh, configuration or self._now) + share

    def ties(self, mesh: Mesh) -> tuple[int, int, tuple[int, ...]]:
        return len(self._mesh.moved(mesh)), len(self._mesh.fetching(mesh)), mesh.nodes

    def rank(self, mesh: Mesh) -> tuple[object, ...]:
        return (_rounded(self.cost(mesh), self._unit), *self.ties(mesh))

    def placements(self, allowed: Callable[[Mesh], bool] | None, most: int) -> tuple[list[Mesh], bool]:
        """Those to choose from, and whether these are all."""
        marked = self._times.marked
        if math.perm(self._mesh.num_nodes, len(marked)) <= most:
            every: Iterable[Mesh] = placements(self._mesh, marked)
            return [each for each in every if allowed is None or allowed(each)], True
        return list(dict.fromkeys(self._by_swaps(marked, allowed))), False

    def _by_swaps(self, marked: Iterable[int], allowed: Callable[[Mesh], bool] | None) -> Iterator[Mesh]:
        """The steps of a descent from where the nodes lie, and of further ones from near the best so far."""
        random, marked = Random(0), set(marked)
        pairs = [pair for pair in combinations(range(self._mesh.num_nodes), 2) if marked & {*pair}]
        best = self._mesh
        for kick in range(KICKS + 1):
            here = best
            for _ in range(SWAPS_A_KICK if kick and pairs else 0):
                here = here.swapped(*random.choice(pairs))
            while True:
                if allowed is None or allowed(here):
                    yield here
                    if self.rank(here) < self.rank(best):
                        best = here
                near = [then for then in (here.swapped(*pair) for pair in pairs) if allowed is None or allowed(then)]
                least = min(near, key=self.rank, default=here)
                if self.rank(least) >= self.rank(here):
                    break
                here = least


def placements(mesh: Mesh, marked: Iterable[int]) -> Iterator[Mesh]:
    """All ways to place the marked nodes; of the others as few move as can be, to a place of their own rank first."""
    marked = tuple(marked)
    for places in permutations(range(mesh.num_nodes), len(marked)):
        taken = dict(zip(places, marked, strict=True))
        nodes: list[int | None] = [
            taken.get(place, None if node in marked else node) for place, node in enumerate(mesh.nodes)
        ]
        homeless = [place for place in places if mesh.nodes[place] not in marked]
        free = [place for place, node in enumerate(nodes) if node is None]
        for here in sorted(homeless, key=lambda place: not any(p // mesh.dp == place // mesh.dp for p in free)):
            there = min(free, key=lambda place: (place // mesh.dp != here // mesh.dp, place))
            free.remove(there)
            nodes[there] = mesh.nodes[here]
        yield Mesh(mesh.pp, mesh.dp, mesh.tp, tuple(node for node in nodes if node is not None))
