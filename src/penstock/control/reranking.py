"""Re-ranking: which node runs which rank of which replica, chosen by the iteration time that comes of it.

A slow link costs most where gradients cross it, less between two ranks of a pipeline, and nothing where it serves
nobody (`Mesh.use`). So moving a few nodes may be all that a slow link needs:

    rank 0   rank 1   rank 2                   rank 0   rank 1   rank 2
      0 ------ 2 ------ 4                        0 ------ 1 ------ 4          0:1 is late. It was in the ring of
      :        :        :       1 <-> 2          :        :        :          rank 0 and joins ranks 0 and 1 now,
      1 ------ 3 ------ 5                        2 ------ 3 ------ 5          where a schedule can absorb it

The simulator says what a placement takes, its rings included, and under which schedule, dispatch and delegates it is
best. PipeMorph (section 6) and FALCON (arXiv 2410.12588) move a slow link under PP as a rule.

All placements of a few nodes are tried. Of more nodes, two are swapped for as long as a swap helps. Nodes whose links
are all alike may stand for each other, so of the swaps that change the same links one is tried. The simulator runs
only for pipelines that it has not seen, where rings would be fast enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from random import Random

from penstock.control.candidate import Measured, candidates, late_links
from penstock.control.configuration import Configuration, Job
from penstock.control.mesh_times import MeshTimes, PlacementKind
from penstock.cost import Links
from penstock.cost.mesh import Mesh
from penstock.engine.tolerance import EPSILON

EXHAUSTIVE = 720
"""Placements up to which all are tried: those of six nodes."""
KICKS, SWAPS_A_KICK = 2, 3
"""Of the search by swaps: how often it starts again, and how many random swaps away from the best it does."""
ABSORBED = 24
"""Kinds of placements for which other schedules are tried; the best ones under what runs now."""
Rank = tuple[float, int, int, tuple[int, ...]]
"""By which placements are compared: time in tiny units, nodes moved, nodes that get another rank, and the nodes."""


@dataclass(frozen=True)
class Reranking:
    """What to do about the links of a mesh.

    Attributes:
        mesh: where the nodes are to lie.
        configuration: what every replica is to run there.
        ms_now: predicted iteration time as things are, in ms.
        ms_moved: predicted iteration time (ms) if nodes move and nothing else changes.
        ms_then: predicted iteration time (ms) if nodes move and the configuration changes.
        ring_ms: how much of `ms_now` links of rings cost by not being as all others are.
        moved: the nodes that are to lie elsewhere.

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
    ring_ms: float
    moved: tuple[int, ...] = ()


def rerank(
    job: Job,
    mesh: Mesh,
    links: Links,
    *,
    now: Configuration | None = None,
    allowed: Callable[[Mesh], bool] | None = None,
) -> Reranking:
    """The placement of nodes, and what to run on it, with the least predicted iteration time.

    It is never slower than staying. Among equals the one that moves the fewest nodes wins, then the one that moves
        the fewest states.

    Args:
        job: costs, rings, memory, and what may be changed. Where its nodes must stay, staying is the only placement.
        mesh: where nodes lie now.
        links: between nodes, as measured.
        now: what runs now; the job's start where not given.
        allowed: says of a placement whether it counts; all count where not given. Staying always does.

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
    times = MeshTimes(job, mesh, links)
    search = _MeshSearch(times, mesh, now, allowed)
    here = times.kind(mesh.nodes)
    if not job.nodes_stay:
        search.try_all() if math.factorial(mesh.num_nodes) <= EXHAUSTIVE else search.try_swaps()
    ms_now = times.of_kind(here, now)
    ranked = sorted(search.seen.items(), key=lambda each: each[1])
    best, chosen, configuration = (ranked[0][1], ranked[0][0], now)
    for kind, rank in [(here, search.seen[here]), *ranked[:ABSORBED]] if not job.nodes_stay else ():
        ms, way = _absorbing(times, kind, now, best[0] * search.unit * EPSILON)
        if (then := (search.units(ms), *rank[1:])) < best:
            best, chosen, configuration = then, kind, way
        if kind == times.healthy:
            break  # no other is faster
    moved = replace(mesh, nodes=best[-1])
    return Reranking(
        moved,
        configuration,
        ms_now=ms_now,
        ms_moved=times.of_kind(chosen, now),
        ms_then=times.of_kind(chosen, configuration),
        ring_ms=ms_now - times.of_kind((here[0], times.healthy[1]), now),
        moved=mesh.moved(moved),
    )


def _absorbing(
    times: MeshTimes, kind: PlacementKind, now: Configuration, below: float
) -> tuple[float, Configuration]:
    """How long an iteration takes with what every replica best runs on placements of a kind, and that: of all
    `candidates`, or `now` if nothing is better.

    Args:
        below: only what takes less (ms) is of interest, so that less is simulated.
    """
    job, links = times.job, times.worst_links(kind)
    late = late_links(dict(links.delays), job.smallest_delay)
    best, ms_now = now, times.of_kind(kind, now)
    least = ms_now * (1 - job.least_gain) * (1 - EPSILON)
    ways = candidates(job, now, Measured.steady(links, late))
    for way in sorted(ways, key=lambda each: (each.price, len(each.configuration.delegated))):
        ms = times.of_kind(kind, way.configuration, limit := min(least, below * (1 + EPSILON)))
        if ms < limit:
            least, best = ms * (1 - EPSILON), way.configuration
    return times.of_kind(kind, best), best


class _MeshSearch:
    """Tries placements under what runs now, and keeps the one of each kind that moves the least."""

    def __init__(
        self, times: MeshTimes, mesh: Mesh, now: Configuration, allowed: Callable[[Mesh], bool] | None
    ) -> None:
        self._times, self._mesh, self._now, self._allowed = times, mesh, now, allowed
        self._ranks = {node: place // mesh.dp for place, node in enumerate(mesh.nodes)}
        self.unit = times.iteration(mesh, now) or 1.0
        self.seen: dict[PlacementKind, Rank] = {}
        self._see(mesh.nodes)

    def units(self, ms: float) -> int:
        """Times apart by less than can matter are the same."""
        return round(ms / self.unit / EPSILON)

    def _see(self, nodes: tuple[int, ...]) -> Rank:
        kind, dp = self._times.kind(nodes), self._mesh.dp
        moved = sum(a != b for a, b in zip(nodes, self._mesh.nodes, strict=True))
        elsewhere = sum(self._ranks[node] != place // dp for place, node in enumerate(nodes))
        rank = self.units(self._times.of_kind(kind, self._now)), moved, elsewhere, nodes
        self.seen[kind] = min(rank, self.seen.get(kind, rank))
        return rank

    def _may_lie(self, nodes: tuple[int, ...]) -> bool:
        return self._allowed is None or self._allowed(replace(self._mesh, nodes=nodes))

    def try_all(self) -> None:
        """Tries all placements."""
        for nodes in filter(self._may_lie, permutations(range(self._mesh.num_nodes))):
            self._see(nodes)

    def try_swaps(self) -> None:
        """Descends by swaps from where the nodes lie, and then again from near the best so far."""
        random = Random(0)
        healthy = self.units(self._times.of_kind(self._times.healthy, self._now))
        for kick in range(KICKS + 1):
            best = min(self.seen.values())
            if best[0] <= healthy:
                return
            nodes = best[-1]
            for _ in range(SWAPS_A_KICK if kick else 0):
                nodes = random.choice([*self._times.swaps(nodes), nodes])
            here = self._see(nodes) if self._may_lie(nodes) else _NOWHERE
            while (then := self._nearest(nodes)) < here:
                here, nodes = then, then[-1]

    def _nearest(self, nodes: tuple[int, ...]) -> Rank:
        """The best placement after one swap."""
        near: dict[PlacementKind, list[tuple[int, ...]]] = {}
        for each in filter(self._may_lie, self._times.swaps(nodes)):
            near.setdefault(self._times.kind(each), []).append(each)
        least, best = math.inf, _NOWHERE
        bounds = {kind: self._times.of_kind(kind, self._now, -math.inf) for kind in near}
        for kind in sorted(near, key=bounds.__getitem__):
            if bounds[kind] > least * (1 + EPSILON):
                break
            ms = self._times.of_kind(kind, self._now, least * (1 + EPSILON))
            if ms <= least * (1 + EPSILON):
                least, best = min(least, ms), min(best, *map(self._see, near[kind]))
        return best


_NOWHERE: Rank = (math.inf, 0, 0, ())
