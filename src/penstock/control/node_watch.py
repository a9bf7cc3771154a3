"""The nodes of a mesh: since when links between them are late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from penstock.control.configuration import Configuration, Job
from penstock.control.events import Link, Probed, undirected
from penstock.control.orchestrator import Orchestrator
from penstock.cost import Mesh

_ROUNDS = 16
"""Rounds of probes that are remembered, each with the iteration after which it came."""


class NodeWatch(Orchestrator):
    """Follows probes, and counts since which step links are late.

    Args:
        job: with a mesh.
        mesh: where its nodes lie.

    Attributes:
        late_since: the iteration in which links between nodes turned late.
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        super().__init__(job, mesh)
        self.late_since = 0
        self._probed: deque[int] = deque(maxlen=_ROUNDS)

    def follow(self, probed: Probed, iteration: int, switched_at: int) -> int:
        """Takes a round of probes. Returns how many steps ago links turned late; 0 where they did not, or where steps
        before that ran something else.
        """
        self._probed.append(iteration)
        if not self.verifies(dict(probed.times)):
            return 0
        self.late_since = 0
        if not self.news:  # late from the first probes on: no steps ran without that
            return 0
        num = max(change.began for change in self.news)
        self.late_since = self._probed[-min(len(self._probed), num)]
        rose = any(change.rose for change in self.news)
        if not rose or len(self._probed) <= num or self._probed[-num - 1] <= switched_at:
            return 0
        return iteration - self.late_since

    def relocate(self, then: Configuration) -> Mapping[Link, float]:
        """Nodes lie where `then` says from now on. Returns how late (ms) the links of the pipeline are there."""
        mesh = replace(self.mesh, nodes=then.nodes)
        self.switched(mesh, then)
        late: dict[Link, float] = {}
        for replica in range(mesh.dp):
            own = mesh.pipeline(replica)
            for a, b in combinations(range(mesh.pp), 2):
                late[a, b] = max(late.get((a, b), 0.0), self.late.get(undirected((own[a], own[b])), 0.0))
        return late
