"""Watches the links between the nodes of a mesh, and says where the nodes should be.

    probes of all links --> a Detector each --> verified: 6:7 is 30 ms late --> rerank --> Reranking, or None

A link that is late from the first probe on never changes. So once its level is known, it is compared with that
of other links.

A collective makes all who wait for it look slow and hides who is late. So links are measured, and not rings: by a
short message there and back, between steps. A decision is a function of what was fed. So every process that is fed
the same decides the same, and need not be informed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.control.changes import Change, Detector, Sensitivity
from penstock.control.configuration import Configuration, Job
from penstock.control.errors import ControlError
from penstock.control.events import Link, undirected
from penstock.control.mesh_times import MeshTimes
from penstock.control.reranking import Moving, Reranking, rerank
from penstock.cost import LinkCondition, Links, Mesh, Ring
from penstock.cost.over_time import Constant

PROBES = Sensitivity(rise=2, small_rise=3, fall=6, calibration=3)
"""A probe is the shortest of several round trips. So fewer of them verify a change than with ordinary messages."""
LEAST = 2.0
"""Milliseconds by which a link between nodes must be late to matter: below, a busy machine looks like a late link."""


class Orchestrator:
    """Says when nodes should change places. It is fed what short messages between all nodes take.

    Args:
        job: costs with `gradient_bytes` or `weight_bytes`, what may change, and the smallest delay that matters.
        mesh: where nodes lie at the start.
        ring: how rings move bytes.
        usual: what holds for all links besides, such as their bandwidth.
        moving: charges a move for the state that nodes must fetch.
        sensitivity: how large a change of a link must be, and for how many probes it must last.
        absorb: whether the order may change with the places, see `rerank`.
        allowed: which meshes may be chosen, see `rerank`.

    Attributes:
        mesh: where nodes lie, as far as the orchestrator has been informed.
        now: what runs, as far as it has been informed.
        late: by link, the ms that it takes longer than links take as a rule.
        news: what the latest round of probes verified.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.cost.costs_preset("gpt2-7b"), ps.build("zb", 4, 12)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> watching = ps.control.Orchestrator(ps.control.Job(costs, start), ps.Mesh(pp=4, dp=2))
        >>> str(watching.mesh), watching.late
        ('0 2 4 6 | 1 3 5 7', {})
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
        absorb: bool = True,
        allowed: Callable[[Mesh], bool] | None = None,
    ) -> None:
        self.job, self.mesh, self.now = job, mesh, job.start
        self.late: dict[Link, float] = {}
        self.news: tuple[Change, ...] = ()
        self._num_rounds = 0
        self._predicted: dict[object, float] = {}
        self._looked: tuple[object, Reranking] | None = None
        self._least = max(LEAST, job.smallest_delay)
        self._ring, self._usual, self._moving, self._sensitivity = ring, usual, moving, sensitivity
        self._absorb, self._allowed = absorb, allowed
        self._detectors: dict[Link, Detector] = {}

    def feed(self, probed: Mapping[Link, float]) -> Reranking | None:
        """Takes the times (ms, one way) of one round of probes, by two nodes each.

        Returns:
            What to do, where a link has verifiably changed and something else is faster by the job's least gain.

        Raises:
            ControlError: a link between nodes that are not there.
        """
        return self.look() if self.verifies(probed) else None

    def verifies(self, probed: Mapping[Link, float]) -> bool:
        """Takes a round of probes, as `feed` does. Says whether it verifies that other links are late than was known,
        or that links are later.
        """
        changed: list[Change] = []
        for link, ms in probed.items():
            if not all(0 <= node < self.mesh.num_nodes for node in link) or link[0] == link[1]:
                raise ControlError(f"link {link}: give two nodes of 0 to {self.mesh.num_nodes - 1}")
            name = undirected(link)
            detector = self._detectors.setdefault(name, Detector(self._least, self._sensitivity))
            if change := detector.feed(ms):
                changed.append(change)
        self._num_rounds += 1
        self.news = tuple(changed)
        if changed:
            self.late = self._late()
            return True
        if self._num_rounds == self._sensitivity.calibration:
            self.late = self._late()
            return bool(self.late)
        return False

    def look(self) -> Reranking | None:
        """What to do about the links as they are known; None if nothing is faster by the job's least gain.

        With many nodes this takes a while, so the result is kept until something changes.
        """
        known = self.mesh, self.now, {link: round(ms / self._least) for link, ms in self.late.items()}
        if self._looked is None or self._looked[0] != known:
            found = rerank(
                self.job,
                self.mesh,
                self.conditions,
                ring=self._ring,
                now=self.now,
                moving=self._moving,
                absorb=self._absorb,
                allowed=self._allowed,
            )
            self._looked = known, found
        found = self._looked[1]
        gain = self.job.least_gain * found.ms_now
        return found if found.ms_then <= found.ms_now - gain else None

    def iteration(self, configuration: Configuration) -> float:
        """The predicted time (ms) of an iteration of what runs, with the links as they are known."""
        key = self.mesh, configuration, tuple(self.late.items())
        if key not in self._predicted:
            times = MeshTimes(self.job, self.mesh, self.conditions, self._ring)
            self._predicted = {key: times.iteration(self.mesh, configuration)}
        return self._predicted[key]

    @property
    def conditions(self) -> Links:
        """Of all links between nodes, as measured."""
        usual = self._usual or LinkCondition()
        late = {link: replace(usual, latency=Constant(ms)) for link, ms in self.late.items()}
        return Links(late, default=self._usual)

    def switched(self, mesh: Mesh, configuration: Configuration | None = None) -> None:
        """Informs the orchestrator where nodes are now and what runs."""
        self.mesh, self.now = mesh, configuration or self.now

    def _late(self) -> dict[Link, float]:
        """Links whose level exceeds the first quartile of all links by enough to matter. Half of the
        links may be late.
        """
        levels = {link: detector.level or 0.0 for link, detector in self._detectors.items()}
        usual = sorted(levels.values())[(len(levels) - 1) // 4]
        return {link: ms - usual for link, ms in levels.items() if ms - usual >= self._least}
