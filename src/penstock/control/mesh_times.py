"""Iteration times of a mesh whose nodes may be at any of its coordinates. Each part of an iteration is
simulated once.

The time of an iteration depends on the placement only through the conditions of its links: those of each replica's
pipeline, and those of each rank's ring. Few of these conditions differ, so they are numbered, and results are kept:

    nodes --> replica 0: (0, 0, 3)  replica 1: (0, 0, 0)      conditions of the links of each pipeline, by number
              rank 0: (1, 0)  rank 1: (0, 0) ...              and of each ring
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.control.configuration import Configuration, Job, order_of
from penstock.control.decide import run_on
from penstock.cost import LinkCondition, Links
from penstock.cost.mesh import Mesh
from penstock.cost.ring import Ring
from penstock.simulation.mesh import WEIGHT_KINDS, after_pipelines, last_gradients, require_mesh

Numbers = tuple[int, ...]
"""Conditions of links, each by its number."""


class PlacementKind(NamedTuple):
    """What distinguishes placements: the links of each replica's pipeline, and of each rank's ring."""

    pipelines: tuple[Numbers, ...]
    rings: tuple[Numbers, ...]


class MeshTimes:
    """Predicts iterations of a job on placements of one shape.

    Args:
        job: what runs on every replica. shape: its sizes; where its nodes lie does not matter.
        links: between nodes.

    Raises:
        ScheduleError, CostError: what `simulate_mesh` refuses.
    """

    def __init__(self, job: Job, shape: Mesh, links: Links, ring: Ring | None = None) -> None:
        self.job, self.links, self.ring = job, Links.of(links), ring or Ring()
        require_mesh(job.start.schedule, job.costs, shape, self.links)
        self._shape = shape
        self._joined = _joined(job)
        self._conditions: list[LinkCondition | None] = [self.links.default]
        self._number = self._numbered(shape.num_nodes)
        self._ran: dict[tuple[Configuration, Numbers], tuple[Mapping[int, float], Sequence[float]]] = {}
        self._found: dict[tuple[Configuration, PlacementKind], float] = {}

    @property
    def marked(self) -> tuple[int, ...]:
        """The nodes with a link that differs from the others. All other nodes are interchangeable."""
        return tuple(sorted({node for pair in self.links.conditions for node in pair}))

    def kind(self, mesh: Mesh) -> PlacementKind:
        """The links that a placement uses. Replicas in another order are the same."""
        number, nodes, dp = self._number, mesh.nodes, mesh.dp
        pipelines = sorted(
            tuple([number[nodes[p * dp + d]][nodes[q * dp + d]] for p, q in self._joined]) for d in range(dp)
        )
        rings = []
        for rank in range(mesh.pp if dp > 1 else 0):
            ring = nodes[rank * dp : (rank + 1) * dp]
            rings.append(tuple([number[ring[i - 1]][ring[i]] for i in range(dp)]))
        return PlacementKind(tuple(pipelines), tuple(rings))

    def iteration(self, mesh: Mesh, configuration: Configuration | None = None) -> float:
        """Milliseconds of an iteration; by default with the configuration at the job's start."""
        return self.of_kind(self.kind(mesh), configuration)

    def of_kind(self, kind: PlacementKind, configuration: Configuration | None = None) -> float:
        """The same, of all placements of a kind."""
        configuration = configuration or self.job.start
        found = self._found.get((configuration, kind))
        if found is None:
            found = self._found[configuration, kind] = self._simulated(kind, configuration)
        return found

    def worst_links(self, kind: PlacementKind) -> Links:
        """The latency of each link between ranks in the replica where it is latest."""
        delays: dict[tuple[int, int], float] = {}
        for numbers in kind.pipelines:
            for pair, each in zip(self._joined, numbers, strict=True):
                condition = self._conditions[each]
                # A busy link delays a message at least by what it is busy.
                ms = 0.0 if condition is None else condition.latency.at(0.0, "") + condition.occupancy.at(0.0, "")
                delays[pair] = max(delays.get(pair, 0.0), ms)
        return Links({pair: ms for pair, ms in delays.items() if ms > 0})

    def _simulated(self, kind: PlacementKind, configuration: Configuration) -> float:
        pipelines = [self._pipeline(configuration, numbers) for numbers in kind.pipelines]

        def ring_ms(rank: int, num_bytes: float, at: float) -> float:
            around = [self._conditions[each] for each in kind.rings[rank]]
            return self.ring.all_reduce_ms(num_bytes, around, self.links.base, at)

        _, ms = after_pipelines(
            last_gradients(configuration.schedule),
            [done for done, _ in pipelines],
            [ends for _, ends in pipelines],
            self.job.costs,
            self._shape,
            ring_ms,
        )
        return ms

    def _pipeline(
        self, configuration: Configuration, numbers: Numbers
    ) -> tuple[Mapping[int, float], Sequence[float]]:
        """When each stage has its gradient, and when each rank ends."""
        found = self._ran.get((configuration, numbers))
        if found is not None:
            return found
        job = self.job
        named = {
            pair: condition
            for pair, each in zip(self._joined, numbers, strict=True)
            if (condition := self._conditions[each]) is not None
        }
        conditions = Links(named, self.links.default, self.links.base)
        ran = run_on(job.costs, job.depth, configuration, conditions, job.delegate_ms)
        end, first = np.asarray(ran.arrays["end_time"]), ran.order.graph.first
        ops = [op for row in ran.order.schedule.order for op in row]
        done: dict[int, float] = {}
        for op, ms in zip(ops, end.tolist(), strict=True):
            if op.kind in WEIGHT_KINDS:
                done[op.stage] = max(done.get(op.stage, 0.0), ms)
        ends = [float(end[first[r] : first[r + 1]].max(initial=0.0)) for r in range(ran.order.num_ranks)]
        self._ran[configuration, numbers] = done, ends
        return done, ends

    def _numbered(self, num_nodes: int) -> list[list[int]]:
        """The number of the condition from each node to each other."""
        known: dict[LinkCondition | None, int] = {self.links.default: 0}
        table = [[0] * num_nodes for _ in range(num_nodes)]
        for a, b in self.links.conditions:
            for source, target in ((a, b), (b, a)):
                condition = self.links.named(source, target)[1]
                if condition not in known:
                    known[condition] = len(self._conditions)
                    self._conditions.append(condition)
                table[source][target] = known[condition]
        return table


def _joined(job: Job) -> tuple[tuple[int, int], ...]:
    """The directed pairs of ranks between which messages go."""
    order, num = order_of(job.start.schedule, job.costs), job.num_ranks
    return tuple(divmod(int(link), num) for link in np.unique(order.crossing[2]))
