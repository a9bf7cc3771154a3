"""One process's part in adapting: sends what its ranks measured, gets plans, and runs them from the end of a step on.

    training            agent                                   threads
    step ends     -->   vote(): what runs, what is held    <--  plans: from the store, proved and worked out
    collective    -->   count_votes(): all votes           -->  reports: to the store
                  <--   run this from now on

Nothing here waits for the store. A thread computes what a plan needs before the process votes for it. Only where rank
0 says that a plan is there do the others look for it in the store, so a store costs nothing while nothing changes.

All ranks switch to a new plan at the same step, or none does: they vote in the collective that ends each step.

    rank 0   runs 2, holds 3 ---+                            +--> all hold 3: from the next step on everybody runs 3
    rank 1   runs 2, holds 3 ---+--> the step's collective --+
    rank 2   runs 2, holds - ---+                            +--> (rank 2 does not: nobody does, and it goes on)

Every rank sees the same votes at the same moment. So no result has to be sent, and nobody waits for one: a plan that
has not reached every rank costs nothing, and a store that is gone cannot hold up training. If the collective itself
fails, the step fails on every rank.

The votes tell how long a step took, too, and who asks for the next step's report: see
`penstock.control.steps`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from penstock.control import Configuration, Dropped, Event, IterationEnded, Switched
from penstock.control.events import Link, LinkTime, Probed
from penstock.control.steps import ReportSampler
from penstock.cost import Costs
from penstock.runtime.adapt.coordinator import ABANDONED_EXIT_S, THREAD_EXIT_S, Coordinator, RunSetting
from penstock.runtime.adapt.options import AdaptOptions
from penstock.runtime.adapt.report import MeasuredStep, report_of
from penstock.runtime.adapt.store import Rendezvous, meet
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers

POLL_S = 0.1
"""Seconds that one look at the queue of plans may last."""
CLOCK_COMPARISON_ITERATIONS = 64
"""Iterations after which clocks of several hosts are compared again: they drift by some milliseconds in a minute."""
GIVE_UP_S = 15.0
"""Seconds after which a plan that not all ranks hold is dropped."""
STOPPED, REFUSED = -1, 0
"""What a rank holds that adapts no more, and the digest that a rank gives for a plan that it cannot run."""
_DIGITS = 12
"""Hexadecimal digits of a digest that are compared: as many as a double carries exactly."""


class Vote(NamedTuple):
    """What a rank tells all others at the end of a step. All are numbers that a double carries exactly.

    Attributes:
        running, running_digest: the decision that it runs (0: what the job started with), and that plan's digest.
        held, held_digest: the decision that it could run next, all worked out; 0 for none.
        us: microseconds that the step took on this process.
        asks: 1 if this process asks all others to report the next step, and more if a plan waits in the store (2) or
            links between nodes should be probed soon (4).
    """

    running: int
    running_digest: int
    held: int = 0
    held_digest: int = 0
    us: int = 0
    asks: int = 0


class VoteResult(NamedTuple):
    """What the votes of a step come to.

    Attributes:
        switch: the decision that all run from the next step on; None for none.
        stopped: the first rank that adapts no more; then nobody does.
        refused: the first rank that cannot run what rank 0 holds.
    """

    switch: int | None = None
    stopped: int | None = None
    refused: int | None = None


def short_digest(digest: str) -> int:
    """A digest (hexadecimal) as a number that fits into a vote; never that of a refusal."""
    return int(digest[:_DIGITS], 16) or 1


def agree(votes: Sequence[Vote]) -> VoteResult:
    """What the votes come to, the same on every rank. Rank 0 leads: only what it holds can be next.

    Raises:
        RuntimeFailure: two ranks run different plans.
    """
    first = votes[0]
    for rank, vote in enumerate(votes):
        if vote[:2] != first[:2]:
            raise RuntimeFailure(
                f"rank {rank} ran plan {vote.running} ({vote.running_digest:x}) and rank 0 plan {first.running} "
                f"({first.running_digest:x}); start again from the last checkpoint"
            )
    stopped = next((rank for rank, vote in enumerate(votes) if vote.held == STOPPED), None)
    if stopped is not None:
        return VoteResult(stopped=stopped)
    if first.held <= first.running:
        return VoteResult()
    theirs = {rank: vote.held_digest for rank, vote in enumerate(votes) if vote.held == first.held}
    for rank, digest in theirs.items():
        if digest == REFUSED or digest != first.held_digest:
            return VoteResult(refused=rank)
    return VoteResult(switch=first.held) if len(theirs) == len(votes) else VoteResult()


@dataclass(frozen=True)
class PreparedPlan:
    """A plan that could run: `made` is what the pipeline worked out for it. None for both: it cannot run here."""

    number: int
    configuration: Configuration | None = None
    made: Any = None

    @property
    def vote_digest(self) -> int:
        return REFUSED if self.configuration is None else short_digest(self.configuration.digest)


class Agent:
    """Adapts one process to what is measured.

    Args:
        ready: works out what a configuration needs to run; called in a thread.
        rendezvous: the store and what it takes to share it; see `meet`.

    Attributes:
        number: of the decision that runs; 0 is what the job started with.
        digest: of what runs.
        pipeline_index: over a mesh, which of the pipelines (replica x shard) this process has ranks of.
        pipeline: the process that runs each rank of it. Both change where nodes move.
        ahead: nanoseconds that this process's clock is ahead of that of each rank of the pipeline. The transport has
            the same list, in which new numbers take the place of the old ones.
        probes: to be called after each step, with whether links between nodes should be probed soon; it returns how
            long messages between nodes take, if the links were probed.
        notices: what a person should know, each once.
    """

    def __init__(
        self,
        options: AdaptOptions,
        setting: RunSetting,
        rendezvous: Rendezvous,
        ready: Callable[[Configuration], Any],
    ) -> None:
        self.number, self.digest = 0, setting.start.digest
        self.notices: list[str] = []
        self.pipeline_index = 0
        self.pipeline: Sequence[int] = range(setting.start.schedule.num_ranks)
        self.ahead: list[int] = []
        self.probes: Callable[[bool], dict[Link, LinkTime] | None] | None = None
        self._options, self._ready = options, ready
        self._stopped: str | None = None
        self._probes_soon = False
        self._iteration = 0
        self._report_sampler = ReportSampler(setting.start.num_updates)
        self._measured: Sequence[MeasuredStep] = ()
        self._unsaid: list[Event] = []
        self._held: PreparedPlan | None = None
        self._voted_for: PreparedPlan | None = None
        self._least = 1
        self._lock = threading.Lock()
        self._since: float | None = None
        self._out: SimpleQueue[tuple[int, MeasuredStep, Sequence[int], int] | None] = SimpleQueue()
        self._stretch = setting.stretch
        self._rendezvous = rendezvous
        self._closed, self._wanted = threading.Event(), threading.Event()
        works = {"penstock-reports": self._send}
        self._coordinator = None
        if rendezvous.first == 0:
            self._coordinator = Coordinator(
                options, setting, rendezvous, self._take, self._stop_later, self.notices.append
            )
        else:
            works["penstock-plans"] = self._receive
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name=name, daemon=True) for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """All decisions so far, as the log has them; on rank 0's process."""
        return list(self._coordinator.decisions) if self._coordinator is not None else []

    # In training.

    def look_at_nodes(self, everyone: Peers, num_steps: int) -> None:
        """Between two steps, where it is time: compares clocks, and probes the links between nodes.

        Every process must call it.

        Args:
            everyone: all processes, as they lie now.
            num_steps: of the run so far, those before it was resumed included.

        Raises:
            DeadlineExceeded, PeerLost: a process is late or gone.
        """
        if self._closed.is_set():
            return
        if self._rendezvous.compare is not None and self._iteration % CLOCK_COMPARISON_ITERATIONS == 0:
            offsets = self._rendezvous.clock_offsets_ns = self._rendezvous.compare(everyone)
            self.ahead[:] = [offsets[self._rendezvous.first] - offsets[process] for process in self.pipeline]
        found = None if self.probes is None else self.probes(self._probes_soon)
        if self._coordinator is not None:
            self._coordinator.num_before = num_steps - self._iteration
            if found is not None:
                self._coordinator.note(self._iteration, Probed.of(found))

    def vote(self, measured: Sequence[MeasuredStep]) -> Vote:
        """What this process tells all others at the end of a step; their answers go to `count_votes`.

        Args:
            measured: of the step, by the ranks of this process.
        """
        self._measured = measured
        us = max((each.end - each.begin for each in measured), default=0) // 1000
        running = self.number, short_digest(self.digest)
        patience = self._options.patience
        if self._stopped is None and self._rendezvous.silent() > patience:
            self._stopped = f"the store was out of reach for more than {patience:g} s: {self._rendezvous.error}"
        if self._stopped is not None:
            return Vote(*running, STOPPED, us=us)
        self._unsaid += [event for each in measured for event in each.events]
        self._voted_for = self._held
        held = self._voted_for or PreparedPlan(0)
        asks = int(bool(self._unsaid))
        if self._coordinator is not None:
            asks |= not self._coordinator.is_calm
            asks |= 2 * (len(self._coordinator.decisions) >= self._least) | 4 * self._coordinator.wants_probes
        return Vote(*running, held.number, held.vote_digest, us, asks)

    def _report(self, us: int, asked: bool) -> None:
        """Reports the step that has ended, or how long it took alone.

        Args:
            us: microseconds that the step took; 0 where no process measured the step.
            asked: whether some process asks for the next one.
        """
        if not us:
            return
        if self._stopped is None and self._report_sampler.ended(us, asked):
            clock_offsets_ns = [self._rendezvous.clock_offsets_ns[process] for process in self.pipeline]
            for each in self._measured:
                news, self._unsaid = self._unsaid, []
                self._out.put((self._iteration, each._replace(events=news), clock_offsets_ns, self.pipeline_index))
        elif self._stopped is None and self._coordinator is not None:
            self._coordinator.note(self._iteration, IterationEnded(self._iteration, us / 1e3 / self._stretch))
        self._iteration += 1  # on all ranks alike, for they compare their clocks together

    def count_votes(self, votes: Sequence[Vote]) -> PreparedPlan | None:
        """What to run from the next step on, where that changes: the same on every rank, or nowhere.

        Raises:
            RuntimeFailure: the ranks have not run the same.
        """
        outcome = agree(votes)
        self._report(max(vote.us for vote in votes), any(vote.asks for vote in votes))
        self._probes_soon = bool(votes[0].asks & 4)
        if votes[0].asks & 2:
            self._wanted.set()
        if outcome.stopped is not None:
            self.end(self._stopped or f"rank {outcome.stopped} can no longer adapt, and says why")
            return None
        if outcome.switch is not None:
            chosen = self._voted_for
            assert chosen is not None, "this process voted for it, too"
            assert chosen.configuration is not None
            self.number, self.digest = chosen.number, chosen.configuration.digest
            self._report_sampler.switched()
            self._forget(chosen.number)
            if self._coordinator is not None:
                self._coordinator.note(self._iteration, Switched(chosen.number))
            return chosen
        if self._coordinator is not None and self._voted_for is not None:
            self._drop_if_late(self._coordinator, self._voted_for.number, outcome.refused)
        return None

    def close(self) -> None:
        """Ends the threads; what is on its way to the store may be lost."""
        self._closed.set()
        self._wanted.set()
        self._out.put(None)
        end = time.monotonic() + THREAD_EXIT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._coordinator is not None:
            self._coordinator.close()
        if self._rendezvous.silent() <= THREAD_EXIT_S:
            self._rendezvous.part(THREAD_EXIT_S)
        self._rendezvous.close()
        for thread in self._threads:
            thread.join(ABANDONED_EXIT_S)

    def _drop_if_late(self, coordinator: Coordinator, number: int, refused: int | None) -> None:
        """Rank 0 drops a plan that some rank cannot run, or that not all ranks hold in time."""
        self._since = self._since or time.monotonic()
        if refused is None and time.monotonic() - self._since < GIVE_UP_S:
            return
        if refused is not None:
            self.notices.append(f"change {number} is not made: rank {refused} cannot run its plan, and says why")
        self._forget(number)
        coordinator.note(self._iteration, Dropped(number))

    def _forget(self, number: int) -> None:
        """Takes no copy of a plan any more, nor of those before it."""
        self._since = self._voted_for = None
        with self._lock:
            self._least = number + 1
            if self._held is not None and self._held.number <= number:
                self._held = None

    def end(self, reason: str) -> None:
        """Adapts no more, on every process alike; training goes on with what runs now."""
        if not self._closed.is_set():
            self.notices.append(f"slow links are no longer answered, and plan {self.number} stays: {reason}")
            self._closed.set()
            self._out.put(None)
            if self._coordinator is not None:
                self._coordinator.stop()
        self._stopped = reason

    def _stop_later(self, reason: str) -> None:
        """From a thread: the next step's end ends adapting on every rank."""
        if self._stopped is None and not self._closed.is_set():
            self._stopped = reason

    # In threads.

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._stop_later(f"rank {self._rendezvous.first} failed to report or to read a plan: {error!r}")

    def _send(self) -> None:
        while (put := self._out.get()) is not None and not self._closed.is_set():
            iteration, measured, clock_offsets_ns, index = put
            report = report_of(iteration, measured, clock_offsets_ns, self._stretch, index)
            self._rendezvous.push(self._rendezvous.reports, json.dumps(vars(report)).encode())

    def _receive(self) -> None:
        queue = self._rendezvous.plans(self._rendezvous.first)
        while not self._closed.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while not self._closed.is_set() and (data := self._rendezvous.pop(queue, POLL_S)) is not None:
                self._take(json.loads(data))

    def _take(self, decision: Mapping[str, Any]) -> None:
        """Proves the plan of a decision and holds it, unless it is old."""
        if self._is_news(decision["number"]):
            prepared = self._prove(decision)
            with self._lock:
                if self._is_news(prepared.number):
                    self._held = prepared

    def _is_news(self, number: int) -> bool:
        held = self._held
        return number >= self._least and (held is None or number > held.number)

    def _prove(self, decision: Mapping[str, Any]) -> PreparedPlan:
        """Reads a plan, proves it, and works out what running it needs."""
        number = decision["number"]
        try:
            configuration = Configuration.from_json(json.dumps(decision["configuration"]))
            return PreparedPlan(number, configuration, self._ready(configuration))
        except Exception as error:  # whatever it is, the others must hear that it will not run
            self.notices.append(f"the plan of change {number} cannot run on rank {self._rendezvous.first}: {error!r}")
            return PreparedPlan(number)


def start_agent(
    options: AdaptOptions, peers: Peers, setting: RunSetting, ready: Callable[[Configuration], Any]
) -> Agent:
    """The agent of this process. Every process must call it.

    Args:
        peers: all ranks of all copies of the pipeline.
        ready: works out what a configuration needs to run; called in a thread.

    Raises:
        ControlError: options that make no sense, or caps below what the start needs.
        RuntimeFailure: the store cannot be reached, or the folder not be written to.
    """
    schedule = setting.start.schedule
    # On every rank, so that all raise alike; what an op takes has no part in it.
    setting.job(options, setting.costs or Costs.assumed(schedule.num_ranks, schedule.placement))
    rendezvous = meet(options.store, peers)
    agents: list[Agent] = []
    try:  # rank 0 alone writes files and starts the controller
        peers.together(lambda: agents.append(Agent(options, setting, rendezvous, ready)), "start to adapt")
    except BaseException:
        (agents[0] if agents else rendezvous).close()
        raise
    return agents[0]
