"""Watches the links between the nodes of a mesh, and says where the nodes should be.

    probes of all links --> two Detectors each --> 2:3 at 5 Mbit/s --> Search --> Reranking --> move, or stay
                            latency, ms per MB     (verified)          (elsewhere: it takes a while)

A link that is late from the first probe on never changes. So once its level is known, it is compared with those of
the other links: it is late, or slow, where it differs enough from the first quartile.

In a collective every member waits for the slowest link, so its time does not say which link that is. So links are
probed one by one between steps, with short and with long messages. Decisions depend only on what was fed. So every
process that is fed the same decides the same, and need not be told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

from penstock.control.changes import Change, Detector, Sensitivity
from penstock.control.configuration import Configuration, Job
from penstock.control.events import ControlError, Link, LinkTime, Probed, Reranked, Transfers, show_link, undirected
from penstock.control.reranking import MeshTimes, Reranking, rerank
from penstock.cost import LinkCondition, Links, Mesh
from penstock.cost.conditions import Constant, LinkQueue
from penstock.simulation.mesh import gradient_bytes

PROBES = Sensitivity(rise=2, small_rise=3, fall=6, calibration=3)
"""A probe is the shortest of several round trips. So fewer of them verify a change than with ordinary messages."""
LEAST = LinkTime(2.0, 8.0)
"""By how much a link between nodes must be late, and slow, to matter: below, a busy machine looks like that. The
second adds 2 ms to the longest message of a probe.
"""
NAMED = 4
"""How many links are named in words; of the others, the number."""
_ROUNDS = 16
"""Rounds of probes that are remembered, each with the iteration after which it came."""


def searched(number: int, job: Job, mesh: Mesh, links: Links, now: Configuration) -> Reranked:
    """Searches for better places of the nodes, which may take a while. Returns the answer as an event."""
    found = rerank(job, mesh, links, now=now)
    then = replace(found.configuration, nodes=found.mesh.nodes)
    return Reranked(number, then.to_json(), found.ms_now, found.ms_moved, found.ms_then, found.ring_ms)


class Orchestrator:
    """Says when nodes should change places. It is fed what messages between all nodes take.

    Args:
        job: costs with `gradient_bytes` or `weight_bytes`, what may change, and the smallest delay that matters.
        mesh: where nodes lie at the start.

    Attributes:
        mesh: where nodes lie, as far as the orchestrator has been informed.
        now: what runs, as far as it has been informed.
        late: by link, the ms that a short message takes longer than on other links.
        slow: by link, the ms that each MB takes longer than on other links.
        excess: by link, the ms that the bytes which it carries in a ring take longer than on other links.
        conditions: of the late and slow links, in two digits, so that links which are about equally late are alike.
        late_since: the iteration in which links between nodes turned late; see `follow`.
        news: what the latest round of probes verified.
        search: makes the search that is due, anywhere; `take` takes its answer. None where the answer is known.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.cost.costs_preset("gpt2-7b"), ps.build("zb", 4, 12)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> watching = ps.control.Orchestrator(ps.control.Job(costs, start), ps.Mesh(pp=4, dp=2))
        >>> str(watching.mesh), watching.late
        ('0 2 4 6 | 1 3 5 7', {})
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.job, self.mesh, self.now = job, mesh, job.start
        self.late: dict[Link, float] = {}
        self.slow: dict[Link, float] = {}
        self.excess: dict[Link, float] = {}
        self.conditions = Links()
        self.late_since = 0
        self.news: tuple[Change, ...] = ()
        self.search: Callable[[], Reranked] | None = None
        self._num_rounds = self._num_searches = 0
        self._predicted: dict[object, float] = {}
        self._asked: object = None
        self._answer: Reranking | None = None
        # Each member of a ring sends nearly twice its gradients, so that is how long messages between nodes are.
        self._ring_mb = 2e-6 * (1 - 1 / mesh.dp) * max(gradient_bytes(job.costs), default=0.0)
        least = max(LEAST.ms, job.smallest_delay)
        self._least = LinkTime(least, max(LEAST.ms_per_mb, least / self._ring_mb if self._ring_mb else 0.0))
        self._detectors: dict[Link, list[Detector]] = {}
        self._probed: deque[int] = deque(maxlen=_ROUNDS)

    def weigh(self, transfers: Transfers) -> None:
        """Takes the longest message of a link for what stages send, where costs say less. Costs as measured say
        nothing, and a slow link would be free for a pipeline.
        """
        costs, size = self.job.costs, max(transfers.num_bytes)
        if size > max(costs.message_bytes, default=0.0):
            self.job = replace(self.job, costs=replace(costs, message_bytes=(size,) * costs.num_stages))

    def verifies(self, probed: Probed) -> bool:
        """Takes a round of probes. Says whether it verifies that other links are late or slow than was known, or that
        links are later.

        Raises:
            ControlError: a link between nodes that are not there.
        """
        changed: list[Change] = []
        for link, times in probed.times:
            if max(link) >= self.mesh.num_nodes:
                raise ControlError(f"link {link}: give two nodes of 0 to {self.mesh.num_nodes - 1}")
            both = self._detectors.setdefault(link, [Detector(least, PROBES) for least in self._least])
            changed += filter(None, [detector.feed(value) for detector, value in zip(both, times, strict=True)])
        self._num_rounds += 1
        self.news = tuple(changed)
        if changed or self._num_rounds == PROBES.calibration:
            self.late, self.slow = self._above_others(0), self._above_others(1)
            self._lay_out()
            return bool(changed or self.excess)
        return False

    def gains(self, found: Reranking) -> bool:
        """Whether an answer is faster than what runs by the job's least gain."""
        return found.ms_then <= found.ms_now * (1 - self.job.least_gain)

    def answer(self) -> Reranking | None:
        """What a search has found for the links as they are known, and for what runs. If there is none yet, `search`
        says what to search.
        """
        asked = self.job, self.mesh, self.conditions, self.now
        if asked != self._asked:
            self._asked, self._answer = asked, None
            self._num_searches += 1
            self.search = partial(searched, self._num_searches, *asked)
        return self._answer

    def take(self, event: Reranked) -> None:
        """Takes the answer to the search; one to an earlier search is out of date."""
        if self.search is not None and event.number == self._num_searches:
            then, self.search = Configuration.from_json(event.configuration), None
            mesh, times = replace(self.mesh, nodes=then.nodes), (event.ms_now, event.ms_moved, event.ms_then)
            self._answer = Reranking(mesh, then, *times, event.ring_ms, self.mesh.moved(mesh))

    def iteration(self, configuration: Configuration) -> float:
        """The predicted time (ms) of an iteration of what runs, with the links as they are known."""
        key = self.mesh, configuration
        if key not in self._predicted:
            times = MeshTimes(self.job, self.mesh, self.conditions)
            self._predicted = {key: times.iteration(self.mesh, configuration)}
        return self._predicted[key]

    @property
    def in_words(self) -> str:
        """The late and slow links: "link between nodes 2:3 at 5 Mbit/s, others 900"."""
        usual, said = self._first_quartile(1), []
        for link in sorted(self.excess, key=self.excess.__getitem__, reverse=True)[:NAMED]:
            name = f"link between nodes {show_link(link)}"
            if link in self.late:
                said.append(f"{name} late by {self.late[link]:.3g} ms")
            if link in self.slow:
                others = f", others {8e3 / usual:.3g}" if usual else ""
                said.append(f"{name} at {8e3 / (self.slow[link] + usual):.3g} Mbit/s{others}")
        more = len(self.excess) - NAMED
        return "; ".join(said) + (f"; and {more} more links" if more > 0 else "")

    def switched(self, mesh: Mesh, configuration: Configuration | None = None) -> None:
        """Informs the orchestrator where nodes are now and what runs."""
        self.mesh, self.now = mesh, configuration or self.now

    def follow(self, probed: Probed, iteration: int, switched_at: int) -> int:
        """Takes a round of probes. Returns the number of steps since the last round before links turned late. Returns
        0 if no link turned late, or if the steps before that round ran another configuration.
        """
        self._probed.append(iteration)
        if not self.verifies(probed):
            return 0
        self.late_since = 0
        if not self.news:  # late from the first probes on: no steps ran without that
            return 0
        num = max(change.began for change in self.news)
        self.late_since = self._probed[-min(len(self._probed), num)]
        rose = any(change.rose for change in self.news)
        if not rose or len(self._probed) <= num or self._probed[-num - 1] <= switched_at:
            return 0
        return iteration - self._probed[-num - 1]

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

    def _lay_out(self) -> None:
        """Makes the conditions of late and slow links, once for each change: there may be 100,000 of these links."""
        names = sorted({*self.late, *self.slow})
        self.excess = {link: self.late.get(link, 0.0) + self._ring_mb * self.slow.get(link, 0.0) for link in names}
        found = {}
        for link in names:
            rate = Constant(float(f"{1e9 / self.slow[link]:.2g}")) if link in self.slow else None
            found[link] = LinkCondition(Constant(float(f"{self.late.get(link, 0.0):.2g}")), bandwidth=rate)
        self.conditions, self._predicted = Links(found), {}

    def _above_others(self, which: int) -> dict[Link, float]:
        """Links whose level exceeds the first quartile of all links by enough to matter. Half of the links may be
        late. One is slow only where a MB takes at least twice as long as on others.
        """
        usual = self._first_quartile(which)
        least = max(self._least[which], which * usual)
        above = {link: (each[which].level or 0.0) - usual for link, each in self._detectors.items()}
        return {link: excess for link, excess in above.items() if excess >= least}

    def _first_quartile(self, which: int) -> float:
        levels = sorted(each[which].level or 0.0 for each in self._detectors.values())
        return levels[(len(levels) - 1) // 4]


def link_times(links: Iterable[Link], conditions: Links, at: float) -> dict[Link, LinkTime]:
    """What messages between pairs of nodes take at a moment (ms) of the links' conditions."""

    def took(link: Link, num_bytes: float) -> float:
        return conditions.delay_of(*link, num_bytes, at, LinkQueue(at, at)).arrived - at

    return {undirected(link): LinkTime(took(link, 0.0), took(link, 1e6) - took(link, 0.0)) for link in links}
