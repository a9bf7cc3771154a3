"""The controller: events in, decisions out. It knows no clock, thread or socket, so its log replays.

Transfers, OpTimes      measure     each direction of each link, each stage, on its own (link.py, compute.py)
IterationEnded    --->  verify      has a delay changed, or an op's time, and does it last (changes.py)
                        choose      the best candidate that is worth its price (candidates.py, decide.py)
Decision          <---  propose     number and digest; all ranks switch or none does
Switched, Dropped --->  from then on that is what runs, or it never was
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.control.candidates import Action, candidates
from penstock.control.changes import Sensitivity
from penstock.control.compute import ComputeChange, scaled
from penstock.control.configuration import Job
from penstock.control.decide import Scored, choose, score
from penstock.control.decision import Decision
from penstock.control.errors import ControlError
from penstock.control.events import (
    Dropped,
    Event,
    IterationEnded,
    Link,
    LinkDown,
    LinkUp,
    OpTimes,
    Switched,
    Transfer,
    Transfers,
    show_link,
    undirected,
)
from penstock.control.link import LinkChange, LinkEstimate
from penstock.control.log import decision_line, event_line, header
from penstock.control.measured import Book
from penstock.control.patience import Patience
from penstock.schedule import Schedule, check

_AGES = (3, 8, 16, 32, 64)
"""Iterations since the last change after which the choice is looked at again, with more known; then every 64."""


@dataclass(frozen=True)
class Counts:
    """Alarms over all links and stages: changes suspected, verified, and followed by nothing; decisions made."""

    suspected: int
    verified: int
    false: int
    decisions: int


class Controller:
    """Decides what a job runs. The same events give the same decisions.

    After a decision it waits for `Switched` or `Dropped` before it makes another; after `Dropped` it leaves the ranks
    in peace for some iterations, unless a link dies.

    Attributes:
        job, sensitivity: as given.
        now: the configuration that runs.
        lost: ms lost so far to not running the best candidate; paid: ms that switches cost so far, never more than
            was lost, except where a dead link forced a switch.
        changes: verified changes of links and stages, each with the iteration in which it was verified.
    """

    def __init__(
        self, job: Job, sensitivity: Sensitivity | None = None, log: Callable[[str], object] | None = None
    ) -> None:
        self.job = job
        self.sensitivity = sensitivity or Sensitivity()
        self.now = job.start
        self.lost = self.paid = 0.0
        self.changes: list[tuple[int, LinkChange | ComputeChange]] = []
        self._log = log
        self._book = Book(job, self.sensitivity)
        self._offered: tuple[Schedule, ...] = ()
        self._iteration, self._ms = -1, 0.0
        self._age = 0
        self._due = False
        self._scored: tuple[Scored, ...] = ()
        self._rate = 0.0
        self._waiting: Decision | None = None
        self._number = 0
        self._patience = Patience()
        self._hold = self.sensitivity.fall // 2
        self._delegated_at = self._returned_at = self._quiet_until = -(10**9)
        if log is not None:
            log(header(job, self.sensitivity))

    @property
    def waiting(self) -> Decision | None:
        """The decision of which it is not known yet whether all ranks run it."""
        return self._waiting

    @property
    def counts(self) -> Counts:
        """How many alarms there were so far, and how many decisions."""
        watches = self._book.watches
        return Counts(
            sum(watch.num_suspected for watch in watches),
            sum(watch.num_verified for watch in watches),
            sum(watch.num_false for watch in watches),
            self._number,
        )

    @property
    def links(self) -> Mapping[Link, LinkEstimate]:
        """What is known of each direction of each link since its last verified change."""
        return self._book.estimates

    @property
    def stranded(self) -> frozenset[Link]:
        """Dead links that nothing can be sent around: the job cannot go on."""
        return frozenset() if self.job.may_delegate else frozenset(self._book.down)

    def feed(self, event: Event) -> tuple[Decision, ...]:
        """Takes an event; returns the decisions it leads to, none or one.

        Raises:
            ControlError: a rank that is not there, iterations that do not rise, or news of a decision that is not
                waiting.
        """
        decision = self._take(event)
        if self._log is not None:
            self._log(event_line(event))
            if decision is not None:
                self._log(decision_line(decision))
        return () if decision is None else (decision,)

    def _take(self, event: Event) -> Decision | None:
        if isinstance(event, Transfer | Transfers | OpTimes):
            self._book.feed(event)
            return None
        if isinstance(event, IterationEnded):
            return self._end_iteration(event)
        elif isinstance(event, LinkDown):
            self._book.check_link(event.link)
            self._book.down.add(undirected(event.link))
            self._due = True
        elif isinstance(event, LinkUp):
            self._book.check_link(event.link)
            self._book.down.discard(undirected(event.link))
            # What comes back may go again: it is left in peace for a while.
            self._delegated_at = self._iteration
        elif isinstance(event, Switched):
            self._switch(self._ended(event.number))
        elif isinstance(event, Dropped):
            self._ended(event.number)
            self._quiet_until = self._iteration + self.sensitivity.fall // 2
            self._due = True
        else:
            check(event.schedule)
            self._offered = (*self._offered, event.schedule)
            self._due = True
        return self._forced()

    def _ended(self, number: int) -> Decision:
        """The decision that was waiting, which is no longer."""
        if self._waiting is None or self._waiting.number != number:
            known = "none is" if self._waiting is None else f"{self._waiting.number} is"
            raise ControlError(f"news of decision {number}, but {known} waiting")
        decision, self._waiting = self._waiting, None
        return decision

    def _switch(self, decision: Decision) -> None:
        moved = set(decision.configuration.delegated) ^ set(self.now.delegated)
        if set(decision.configuration.delegated) - set(self.now.delegated):
            if self._iteration - self._returned_at <= 4 * self._hold:
                self._hold = min(2 * self._hold, self.sensitivity.most_fall // 2)
            else:
                self._hold = self.sensitivity.fall // 2
            self._delegated_at = self._iteration
        elif moved:
            self._returned_at = self._iteration
        self._book.move(moved, self.now.delegated)
        self.now = decision.configuration
        self.paid += decision.price if decision.ms_now is not None else 0.0
        self._due = True
        self._rate = 0.0

    def _end_iteration(self, event: IterationEnded) -> Decision | None:
        if event.number <= self._iteration:
            raise ControlError(f"iteration {event.number} ended after iteration {self._iteration}: numbers rise")
        self._iteration, self._ms = event.number, event.ms
        self._age += 1
        news = self._book.end_iteration()
        self.changes += [(event.number, change) for change in news]
        if news:
            self._age = 0
        back = bool(self.now.delegated) and event.number - self._delegated_at == self._hold
        self._due = self._due or bool(news) or self._is_age_to_look() or back
        before, began = self._rate, max((change.num_iterations for change in news), default=1)
        if self._due and self._waiting is None:
            self._look()
        # A change began some iterations ago, and has cost since then.
        self.lost += self._rate + (began - 1) * max(0.0, self._rate - before)
        if self._waiting is not None or event.number < self._quiet_until:
            return None
        return self._decide(news)

    def _is_age_to_look(self) -> bool:
        return self._age in _AGES or (self._age > 0 and self._age % _AGES[-1] == 0)

    def _forced(self) -> Decision | None:
        """A dead link cannot wait for the iteration to end."""
        if self._waiting is not None or self._book.down <= set(self.now.delegated):
            return None
        self._look()
        return self._decide([])

    def _look(self) -> None:
        """Simulates all candidates under the links as they are now."""
        self._due = False
        measured = self._book.measured(self.now.delegated, self._ms)
        job = replace(self.job, costs=scaled(self.job.costs, measured.factors)) if measured.factors else self.job
        found = candidates(job, self.now, measured, self._offered, self._may_return())
        self._scored = tuple(score(job, measured, each) for each in found)
        self._rate = choose(self._scored, 0.0, self.job.least_gain)[1] if self._scored else 0.0

    def _may_return(self) -> bool:
        return self._iteration - self._delegated_at >= self._hold

    def _decide(self, news: Sequence[LinkChange | ComputeChange]) -> Decision | None:
        if not self._scored:
            return None
        forced = self._scored[0].candidate.action is not Action.KEEP
        if not forced and self._patience.waits(self._iteration):
            return None
        gain = self.job.least_gain * self._patience.times_gain(self._iteration, bool(news))
        # Where links vary, a calm while is no reason to go back: that a delay fell must be verified.
        returning = self._may_return() and (bool(news) or self._scored[0].worst is None)
        wary = self._patience.is_wary(self._iteration)
        chosen, _ = choose(self._scored, self.lost - self.paid, gain, returning=returning, wary=wary)
        if chosen.candidate.action is Action.KEEP:
            return None
        check(chosen.candidate.configuration.schedule)
        if not forced:
            self._patience.decided(self._iteration)
        now = None if forced else self._scored[0]
        recent = list(news) or [self._book.again(change) for _, change in self.changes[-1:]]
        self._number += 1
        self._waiting = Decision(
            self._number,
            self._iteration,
            chosen.candidate.action,
            chosen.candidate.configuration,
            self._reason(recent, None if now is None else now.ms, chosen.ms),
            None if now is None else now.ms,
            chosen.ms,
            chosen.candidate.price,
            tuple(dict.fromkeys(str(change.cause) for change in recent)),
            chosen.peaks,
            self.job.in_host(chosen.peaks),
        )
        return self._waiting

    def _reason(self, news: Sequence[LinkChange | ComputeChange], now: float | None, then: float) -> str:
        parts = []
        if now is None:
            parts.append("link " + ", ".join(show_link(link) for link in sorted(self._book.down)) + " is down")
        parts += map(str, news)
        times = f"{then:.4g} ms an iteration" + ("" if now is None else f" instead of {now:.4g}")
        return "; ".join([*parts, f"simulated {times}"])
