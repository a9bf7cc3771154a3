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

The time of an iteration depends on the placement only through the conditions of its links: those of each replica's
pipeline, and those of each rank's ring. Few of these conditions differ, so they are numbered, and results are kept:

    nodes --> replica 0: (0, 0, 3)  replica 1: (0, 0, 0)      conditions of the links of each pipeline, by number
              rank 0: (1, 0)  rank 1: (0, 0) ...              and of each ring

It does not matter which replica has which pipeline, nor where a ring begins. A swap of two nodes changes two
pipelines and two rings at most; the others have been looked up before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations
from random import Random

import numpy as np

from penstock.control.configuration import Configuration, Job, order_of
from penstock.control.decide import Measured, candidates, late_links, run_on
from penstock.cost import LinkCondition, Links
from penstock.cost.mesh import Mesh
from penstock.engine.tolerance import EPSILON
from penstock.simulation.mesh import WEIGHT_KINDS, after_pipelines, last_gradients, require_mesh

EXHAUSTIVE = 720
"""Placements up to which all are tried: those of six nodes."""
KICKS, SWAPS_A_KICK = 2, 3
"""Of the search by swaps: how often it starts again, and how many random swaps away from the best it does."""
ABSORBED = 24
"""Kinds of placements for which other schedules are tried; the best ones under what runs now."""
Numbers = tuple[int, ...]
"""Conditions of links, each by its number; 0 is that of all links which were not given."""
Ends = tuple[Mapping[int, float], Sequence[float]]
"""Of a pipeline, when each stage has its whole gradient, and when each rank ends."""


PlacementKind = tuple[frozenset[Numbers], tuple[Numbers, ...]]
"""What distinguishes placements: the links of the replicas' pipelines, and of each rank's ring."""
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


class MeshTimes:
    """Predicts iterations of a job on placements of one shape.

    Args:
        job: what runs on every replica. shape: its sizes; where its nodes lie does not matter.
        links: between nodes.

    Attributes:
        healthy: the kind of placements that use no link which was given.

    Raises:
        ScheduleError, CostError: what `simulate_mesh` refuses.
    """

    def __init__(self, job: Job, shape: Mesh, links: Links) -> None:
        self.job, self.shape, self.links = job, shape, Links.of(links)
        require_mesh(job.start.schedule, job.costs, shape, self.links)
        order = order_of(job.start.schedule, job.costs)
        self._joined = [divmod(int(link), job.num_ranks) for link in np.unique(order.crossing[2])]
        known: dict[LinkCondition | None, int] = {self.links.default: 0}
        self._numbers = np.zeros((shape.num_nodes, shape.num_nodes), np.int32)
        for pair in (each for a, b in self.links.conditions for each in ((a, b), (b, a))):
            self._numbers[pair] = known.setdefault(self.links.named(*pair)[1], len(known))
        self._conditions, self._table = list(known), self._numbers.tolist()
        self._is_steady = all(each is None or each.is_steady for each in known)
        self._pipeline_of, self._ring_of, self._last = cache(self._pipeline), cache(self._ring), cache(last_gradients)
        self._ring_ms = cache(self._simulated_ring)
        self._ran: dict[tuple[str, Numbers], Ends] = {}
        self._found: dict[tuple[str, PlacementKind], float] = {}
        self._no_links = (0,) * len(self._joined)
        num_rings = shape.pp if shape.dp > 1 else 0
        self.healthy: PlacementKind = frozenset({self._no_links}), ((0,) * shape.dp,) * num_rings

    @cached_property
    def classes(self) -> list[int]:
        """Of each node, the lowest node that may stand for it, since their links to all others are alike."""
        found = list(range(self.shape.num_nodes))
        for number in np.unique(self._numbers):
            alike: dict[bytes, int] = {}
            for node in np.flatnonzero((self._numbers == number).any(1)).tolist():
                both = np.stack([self._numbers[node], self._numbers[:, node]])
                both[:, node] = number  # what joins the two must be this number then
                found[node] = min(found[node], alike.setdefault(both.tobytes(), node))
        return found

    @cached_property
    def marked(self) -> tuple[int, ...]:
        """The nodes outside of the largest class. All others may stand for one another."""
        (most, _), *_ = Counter(self.classes).most_common(1)
        return tuple(node for node, each in enumerate(self.classes) if each != most)

    def kind(self, nodes: Sequence[int]) -> PlacementKind:
        """The links that a placement uses, given as in `Mesh.nodes`."""
        pp, dp = self.shape.pp, self.shape.dp
        rings = [self._ring_of(nodes[r * dp : (r + 1) * dp]) for r in range(pp if dp > 1 else 0)]
        return frozenset([self._pipeline_of(nodes[d::dp]) for d in range(dp)]), tuple(rings)

    def iteration(self, mesh: Mesh, configuration: Configuration | None = None) -> float:
        """Milliseconds of an iteration; by default with the configuration at the job's start."""
        return self.of_kind(self.kind(mesh.nodes), configuration or self.job.start)

    def of_kind(self, kind: PlacementKind, configuration: Configuration, below: float = math.inf) -> float:
        """The same, of all placements of a kind. If it is not below a limit, any time that is not: pipelines are
        simulated one after the other for as long as those known so far, and the rings, take less.
        """
        digest, missing = configuration.digest, sorted(kind[0])
        while (digest, kind) not in self._found:
            ran = [self._ran[digest, each] for each in kind[0] if (digest, each) in self._ran]
            missing = [each for each in missing if (digest, each) not in self._ran]
            ms = self._after(configuration, kind[1], ran or [self._simulate(configuration, self._no_links)])
            if not missing:
                self._found[digest, kind] = ms
            elif ms >= below:
                return ms
            else:
                self._simulate(configuration, missing.pop())
        return self._found[digest, kind]

    def _after(self, configuration: Configuration, rings: Sequence[Numbers], ran: Sequence[Ends]) -> float:
        """When the last rank has updated, after these pipelines."""

        def ring_ms(rank: int, num_bytes: float, at: float) -> float:
            return self._ring_ms(rings[rank], num_bytes, 0.0 if self._is_steady else at)

        done, ends = zip(*ran, strict=True)
        last = self._last(configuration.schedule)
        return after_pipelines(last, done, ends, self.job.costs, self.shape, ring_ms)[1]

    def worst_links(self, kind: PlacementKind) -> Links:
        """The latency of each link between ranks in the replica where it is latest."""
        delays: dict[tuple[int, int], float] = {}
        for numbers in kind[0]:
            for pair, each in zip(self._joined, numbers, strict=True):
                condition = self._conditions[each]
                # A busy link delays a message at least by what it is busy.
                ms = 0.0 if condition is None else condition.latency.at(0.0, "") + condition.occupancy.at(0.0, "")
                delays[pair] = max(delays.get(pair, 0.0), ms)
        return Links({pair: ms for pair, ms in delays.items() if ms > 0})

    def swaps(self, nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Nodes after a swap of two of them, one for each way in which a swap may change anything.

        What a swap changes depends on the ranks, on the classes of the nodes in both replicas and beside them in
        their rings, and on whether the replicas lie side by side. So of most replicas one stands for all.
        """
        classes, dp, marked = self.classes, self.shape.dp, set(self.marked)
        columns = [tuple([classes[node] for node in nodes[d::dp]]) for d in range(dp)]
        beside = [(columns[d - 1], columns[d], columns[(d + 1) % dp]) for d in range(dp)]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(beside))}
        places = [(place // dp, numbers[beside[place % dp]]) for place in range(len(nodes))]
        firsts = {places[place]: place for place, node in enumerate(nodes) if node in marked}
        seen: set[object] = set()
        for kind, one in firsts.items():
            for other, node in reversed([*enumerate(nodes)]):
                apart = (other - one) % dp
                key = kind, places[other], apart if apart < 3 else max(apart, dp - 3)
                if classes[node] != classes[nodes[one]] and key not in seen:
                    seen.add(key)
                    then = list(nodes)
                    then[one], then[other] = node, nodes[one]
                    yield tuple(then)

    def _pipeline(self, nodes: tuple[int, ...]) -> Numbers:
        return tuple([self._table[nodes[p]][nodes[q]] for p, q in self._joined])

    def _ring(self, nodes: tuple[int, ...]) -> Numbers:
        """The links of a ring, from where the numbers are least, so that rings which begin elsewhere are the same."""
        numbers = tuple([self._table[nodes[i - 1]][node] for i, node in enumerate(nodes)])
        most = max(numbers)
        turns = (i for i, each in enumerate(numbers) if each == most and most > min(numbers))
        return min((numbers[i:] + numbers[:i] for i in turns), default=numbers)

    def _simulated_ring(self, numbers: Numbers, num_bytes: float, at: float) -> float:
        around = [self._conditions[each] for each in numbers]
        return self.job.ring.all_reduce_ms(num_bytes, around, self.links.base, at)

    def _simulate(self, configuration: Configuration, numbers: Numbers) -> Ends:
        """Simulates a pipeline, once."""
        key = configuration.digest, numbers
        if key not in self._ran:
            joined = ((pair, self._conditions[each]) for pair, each in zip(self._joined, numbers, strict=True))
            named = {pair: condition for pair, condition in joined if condition is not None}
            links = Links(named, self.links.default, self.links.base)
            ran = run_on(self.job.costs, self.job.transport, configuration, links)
            end, done = np.asarray(ran.end_time), dict[int, float]()
            for op, ms in zip((op for row in ran.order.schedule.order for op in row), end.tolist(), strict=True):
                if op.kind in WEIGHT_KINDS:
                    done[op.stage] = max(done.get(op.stage, 0.0), ms)
            ranks = np.split(end, ran.order.graph.first[1 : ran.order.num_ranks + 1])[: ran.order.num_ranks]
            self._ran[key] = done, [float(each.max(initial=0.0)) for each in ranks]
        return self._ran[key]
