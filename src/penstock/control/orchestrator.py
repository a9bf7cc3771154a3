"""Watches the links between the nodes of a mesh, and says where the nodes should lie.

    probes of all links --> a Detector each --> verified: 6:7 is 30 ms late --> rerank --> Reranking, or None

A collective makes all who wait for it look slow and hides who is late, so links are measured and not rings: a short
message there and back, between steps. What is decided is a function of what was fed, so every process that is fed the
same decides the same, and nobody needs to be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from penstock.control.changes import Change, Detector, Sensitivity
from penstock.control.configuration import Configuration, Job
from penstock.control.errors import ControlError
from penstock.control.events import Link, undirected
from penstock.control.reranking import Moving, Reranking, rerank
from penstock.cost import LinkCondition, Links, Mesh, Ring
from penstock.cost.over_time import Constant

PROBES = Sensitivity(rise=2, small_rise=3, fall=6, calibration=3)
"""A probe is the shortest of several round trips, so that fewer of them verify a change than messages in use do."""


class Orchestrator:
    """Attributes:
    mesh, now: where nodes lie and what runs, as far as told.
    late: ms that each late link takes besides what links take as a rule.

    Args:
        job: costs with `gradient_bytes` or `weight_bytes`; what may change; the smallest delay that matters.
        ring: how rings move bytes. usual: what holds for all links besides, their bandwidth say.
        moving: charges a move for the state that nodes must fetch.
    """

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        *,
        ring: Ring | None = None,
        usual: LinkCondition | None = None,
        moving: Moving | None = None,
        sensitivity: Sensitivity = PROBES,
    ) -> None:
        self.job, self.mesh, self.now = job, mesh, job.start
        self.late: dict[Link, float] = {}
        self._ring, self._usual, self._moving, self._sensitivity = ring, usual, moving, sensitivity
        self._detectors: dict[Link, Detector] = {}

    def feed(self, probed: Mapping[Link, float]) -> Reranking | None:
        """Takes the times (ms, one way) of one round of probes, by two nodes each.

        Returns:
            What to do, where a link has verifiably changed and something else is faster by the job's least gain.

        Raises:
            ControlError: a link between nodes that are not there.
        """
        changed: list[Change] = []
        for link, ms in probed.items():
            if not all(0 <= node < self.mesh.num_nodes for node in link) or link[0] == link[1]:
                raise ControlError(f"link {link}: give two nodes of 0 to {self.mesh.num_nodes - 1}")
            name = undirected(link)
            detector = self._detectors.setdefault(name, Detector(self.job.smallest_delay, self._sensitivity))
            if change := detector.feed(ms):
                changed.append(change)
        if not changed:
            return None
        self.late = self._late()
        found = rerank(self.job, self.mesh, self.conditions, ring=self._ring, now=self.now, moving=self._moving)
        gain = self.job.least_gain * found.ms_now
        return found if found.ms_then <= found.ms_now - gain else None

    @property
    def conditions(self) -> Links:
        """Of all links between nodes, as measured."""
        usual = self._usual or LinkCondition()
        late = {link: replace(usual, latency=Constant(ms)) for link, ms in self.late.items()}
        return Links(late, default=self._usual)

    def switched(self, mesh: Mesh, configuration: Configuration | None = None) -> None:
        """Nodes lie here now, and this runs."""
        self.mesh, self.now = mesh, configuration or self.now

    def _late(self) -> dict[Link, float]:
        """Links whose level lies above what half of all links have by what matters."""
        levels = {link: detector.level or 0.0 for link, detector in self._detectors.items()}
        usual = median(levels.values())
        return {link: ms - usual for link, ms in levels.items() if ms - usual >= self.job.smallest_delay}
