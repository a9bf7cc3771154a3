"""The controller: events in, decisions out. It knows no clock, thread or socket, so its log replays.

Transfer ...            measure     each direction of each link on its own (link.py)
IterationEnded    --->  verify      has a delay changed, and does it last (changes.py)
                        choose      the best candidate that is worth its price (candidates.py, decide.py)
Decision          <---  propose     number and digest; all ranks switch or none does (commit.py)
Switched, Dropped --->  from then on that is what runs, or it never was
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.control.candidates import Action, Measured, candidates, late_links
from penstock.control.changes import Sensitivity
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
    Switched,
    Transfer,
    show_link,
    undirected,
)
from penstock.control.link import LinkChange, LinkEstimate, LinkWatch
from penstock.control.log import decision_line, event_line, header
from penstock.control.robust import deviation
from penstock.cost import LinkCondition, LinkConditions, Links
from penstock.cost.over_time import Constant, Trace
from penstock.schedule import Schedule, check

_AGES = (3, 8, 16, 32, 64)
"""Iterations since the last change after which the choice is looked at again, with more known; then every 64."""
_SCENARIOS = 3
"""Iterations that stand for all where delays differ from one to the next."""


@dataclass(frozen=True)
class Counts:
    """Alarms over all links: suspected changes, those verified, those that nothing followed; decisions made."""

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
        changes: verified changes of links, each with the iteration in which it was verified.
    """

    def __init__(
        self, job: Job, sensitivity: Sensitivity | None = None, log: Callable[[str], object] | None = None
    ) -> None:
        self.job = job
        self.sensitivity = sensitivity or Sensitivity()
        self.now = job.start
        self.lost = self.paid = 0.0
        self.changes: list[tuple[int, LinkChange]] = []
        self._log = log
        self._watches: dict[Link, LinkWatch] = {}
        self._known: dict[Link, tuple[float, ...]] = {}
        self._down: set[Link] = set()
        self._offered: tuple[Schedule, ...] = ()
        self._iteration, self._ms = -1, 0.0
        self._age = 0
        self._due = False
        self._scored: tuple[Scored, ...] = ()
        self._rate = 0.0
        self._waiting: Decision | None = None
        self._number = 0
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
        watches = self._watches.values()
        return Counts(
            sum(watch.num_suspected for watch in watches),
            sum(watch.num_verified for watch in watches),
            sum(watch.num_false for watch in watches),
            self._number,
        )

    @property
    def links(self) -> Mapping[Link, LinkEstimate]:
        """What is known of each direction of each link since its last verified change."""
        found = {link: watch.estimate() for link, watch in sorted(self._watches.items())}
        return {link: estimate for link, estimate in found.items() if estimate is not None}

    @property
    def stranded(self) -> frozenset[Link]:
        """Dead links that nothing can be sent around: the job cannot go on."""
        return frozenset() if self.job.may_delegate else frozenset(self._down)

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
        if isinstance(event, Transfer):
            self._watch(event.link).feed(event)
        elif isinstance(event, IterationEnded):
            return self._end_iteration(event)
        elif isinstance(event, LinkDown):
            self._check_ranks(event.link)
            self._down.add(undirected(event.link))
            self._due = True
        elif isinstance(event, LinkUp):
            self._check_ranks(event.link)
            self._down.discard(undirected(event.link))
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

    def _watch(self, link: Link) -> LinkWatch:
        if link not in self._watches:
            self._check_ranks(link)
            self._watches[link] = LinkWatch(link, self.job.smallest_delay, self.sensitivity)
        return self._watches[link]

    def _check_ranks(self, link: Link) -> None:
        if max(link) >= self.job.num_ranks:
            raise ControlError(f"link {show_link(link)}: ranks go from 0 to {self.job.num_ranks - 1}")

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
        for link, watch in self._watches.items():
            if undirected(link) in moved:
                self._known[link] = self._delays(link)
                watch.restart()
        self.now = decision.configuration
        self.paid += decision.price if decision.ms_now is not None else 0.0
        self._due = True
        self._rate = 0.0

    def _end_iteration(self, event: IterationEnded) -> Decision | None:
        if event.number <= self._iteration:
            raise ControlError(f"iteration {event.number} ended after iteration {self._iteration}: numbers rise")
        self._iteration, self._ms = event.number, event.ms
        self._age += 1
        news = [change for _, watch in sorted(self._watches.items()) if (change := watch.end_iteration())]
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
        if self._waiting is not None or self._down <= set(self.now.delegated):
            return None
        self._look()
        return self._decide([])

    def _look(self) -> None:
        """Simulates all candidates under the links as they are now."""
        self._due = False
        measured = self._measured()
        found = candidates(self.job, self.now, measured, self._offered, self._may_return())
        self._scored = tuple(score(self.job, measured, each) for each in found)
        self._rate = choose(self._scored, 0.0, self.job.least_gain)[1] if self._scored else 0.0

    def _may_return(self) -> bool:
        return self._iteration - self._delegated_at >= self._hold

    def _decide(self, news: Sequence[LinkChange]) -> Decision | None:
        if not self._scored:
            return None
        chosen, _ = choose(self._scored, self.lost - self.paid, self.job.least_gain, returning=self._may_return())
        if chosen.candidate.action is Action.KEEP:
            return None
        now = self._scored[0] if self._scored[0].candidate.action is Action.KEEP else None
        self._number += 1
        self._waiting = Decision(
            self._number,
            self._iteration,
            chosen.candidate.action,
            chosen.candidate.configuration,
            self._reason(news, None if now is None else now.ms, chosen.ms),
            None if now is None else now.ms,
            chosen.ms,
            chosen.candidate.price,
        )
        return self._waiting

    def _reason(self, news: Sequence[LinkChange], now: float | None, then: float) -> str:
        parts = []
        if now is None:
            parts.append("link " + ", ".join(show_link(link) for link in sorted(self._down)) + " is down")
        recent = list(news) or [change for _, change in self.changes[-1:]]
        for each in recent:
            before, after = each.change.before, each.change.after
            if each.cause == "loss":
                parts.append(f"link {show_link(each.link)}: late messages {before:.0%} -> {after:.0%} (loss)")
            else:
                parts.append(f"link {show_link(each.link)}: {before:.3g} -> {after:.3g} ms ({each.cause})")
        times = f"{then:.4g} ms an iteration" + ("" if now is None else f" instead of {now:.4g}")
        return "; ".join([*parts, f"simulated {times}"])

    def _own(self, link: Link, delays: Sequence[float]) -> tuple[float, ...]:
        """Delays of the link's own path: what delegates add is taken off."""
        added = self.job.delegate_ms if undirected(link) in self.now.delegated else 0.0
        return tuple(max(0.0, delay - added) for delay in delays)

    def _delays(self, link: Link) -> tuple[float, ...]:
        """Recent delays of the link's own path, one an iteration."""
        return self._own(link, self._watches[link].delays) or self._known.get(link, (0.0,))

    def _measured(self) -> Measured:
        rows = {link: self._delays(link) for link in sorted(self._watches)}
        middle = {link: median(row) for link, row in rows.items()}
        late, down = late_links(middle, self.job.smallest_delay), frozenset(self._down)
        if all(self._is_steady(link) for link in rows):
            return Measured.steady(Links(middle), late, down)
        # Iterations by how late the links were in all, and some of them evenly picked to stand for all.
        length = max(map(len, rows.values()))
        ordered = sorted(range(length), key=lambda back: sum(row[-1 - back % len(row)] for row in rows.values()))
        picked = [ordered[(2 * part + 1) * length // (2 * _SCENARIOS)] for part in range(_SCENARIOS)]
        scenarios = tuple(self._scenario(rows, back) for back in dict.fromkeys(picked))
        harshest = Links({link: max(row) for link, row in rows.items()})
        return Measured(scenarios, Links(middle), harshest, late, down)

    def _is_steady(self, link: Link) -> bool:
        """Whether the link's delay differs little, from message to message and iteration to iteration."""
        row, single = self._delays(link), self._watches[link].times(0)
        bound = max(self.job.smallest_delay, self.sensitivity.share * median(row))
        return deviation(row) <= bound and (not single or deviation(single) <= bound)

    def _scenario(self, rows: Mapping[Link, Sequence[float]], back: int) -> LinkConditions:
        """The links as they were `back` iterations ago: each message's delay, evenly laid over the iteration."""
        conditions = {}
        for link, row in rows.items():
            delays = self._own(link, self._watches[link].times(back)) or (row[-1],)
            step = self._ms / len(delays)
            times = tuple(step * at for at in range(len(delays)))
            conditions[link] = LinkCondition(Trace(times, delays) if step > 0 else Constant(delays[0]))
        return LinkConditions(conditions)
