"""What is known of all links and all stages together, on which the controller's choice is based.

Transfers           ---> one LinkWatch per direction  ---+
OpTimes             ---> one ComputeWatch per stage   ---+---> changes, and `Measured`: links and costs as they are
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, median

from penstock.control.changes import SUSPICIOUS, USUAL, deviation
from penstock.control.configuration import Configuration, Job
from penstock.control.decide import Measured
from penstock.control.events import ControlError, Link, LinkDown, LinkUp, OpTimes, Transfers, show_link, undirected
from penstock.control.watches import Cause, ComputeChange, ComputeWatch, Factors, LinkChange, LinkWatch, scaled
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Constant, Trace
from penstock.planning.warmup import MIN_SLACK, tolerance, tolerances
from penstock.schedule import ScheduleError
from penstock.schedule.messages import GLOO, NCCL_EDGE

_SCENARIOS = 3
"""Iterations that represent all, if delays differ from one iteration to the next."""

_WAIT = 3.0
"""How many times as long as on other links a message may take for another reason than its link."""

LATER = 1.5
"""How many times as late a link must be as known, to be taken for later."""


@dataclass(frozen=True)
class LinksOfStep:
    """What was measured of links in one step.

    Attributes:
        rows: by direction, the delay of each message and how long the link is busy with one, in ms.
        ms: what the step took.
    """

    rows: Mapping[Link, tuple[tuple[float, ...], float]]
    ms: float

    def links(self, sooner: Mapping[Link, float] | None = None) -> Links:
        """As conditions.

        Args:
            sooner: by how many ms links, each named by its lower rank first, are less late than measured.
        """
        found = {}
        for link, (delays, busy) in self.rows.items():
            less = (sooner or {}).get(undirected(link), 0.0)
            delays = tuple(max(0.0, delay - less) for delay in delays) if less else delays
            found[link] = _laid(delays, self.ms, min(busy, fmean(delays)))
        return Links(found)


class JobMonitor:
    """All watches of a job, and what they have verified to be late.

    A late link is named by its two ends, a slow stage by its number twice.

    Attributes:
        down: links whose own path is dead; none where links may not be delegated, as nothing could be done then.
        late_since: the iteration in which the newest of what is late came.
        reported: the measurements of the latest iteration; none where only its time is known.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.down: set[Link] = set()
        self.late_since = 0
        self.reported: list[Transfers | OpTimes] = []
        self._delegated = set(job.start.delegated)
        self._links: dict[Link, LinkWatch] = {}
        self._stages: dict[tuple[int, int], ComputeWatch] = {}
        self._known: dict[Link, tuple[float, ...]] = {}
        self._reported: list[Transfers | OpTimes] = []
        self._late: dict[Link, tuple[float, float]] = {}
        """How long each takes (ms), and how long it took before."""
        self._seen: dict[Link, int] = {}

    @property
    def late(self) -> dict[Link, float]:
        """How late (ms) each link or stage is that was verified to be late, and still is."""
        return {key: ms for key, (ms, _) in self._late.items()}

    @property
    def rises(self) -> Mapping[Link, float]:
        """By how much (ms) each late link became later."""
        return {key: ms - before for key, (ms, before) in self._late.items() if key[0] != key[1]}

    @property
    def is_suspicious(self) -> bool:
        """Whether the latest measurements speak for a change that is not verified yet."""
        found = [each.detectors for watches in (self._links, self._stages) for each in watches.values()]
        return any(each.pending >= SUSPICIOUS for each in chain.from_iterable(found))

    @property
    def factors(self) -> Factors:
        """How many times as long ops take as the job's costs say, where they changed."""
        return tuple(
            (stage, kind, factor)
            for (_, stage), watch in sorted(self._stages.items())
            for kind, factor in sorted(watch.factors.items())
        )

    def feed(self, event: Transfers | OpTimes) -> None:
        """Takes a measurement. Raises ControlError for a rank or a stage that is not there."""
        if isinstance(event, OpTimes):
            stage = event.rank, event.stage
            if stage not in self._stages:
                if event.rank >= self.job.num_ranks or event.stage >= self.job.costs.num_stages:
                    raise ControlError(
                        f"ops of rank {event.rank}, stage {event.stage}: ranks go from 0 to "
                        f"{self.job.num_ranks - 1}, stages to {self.job.costs.num_stages - 1}"
                    )
                self._stages[stage] = ComputeWatch(*stage, self.job.smallest_delay)
        elif event.link not in self._links:
            self.check_link(event.link)
            self._links[event.link] = LinkWatch(event.link, self.job.smallest_delay, self.job.start.num_updates)
        self._reported.append(event)

    def end_iteration(self, number: int) -> list[LinkChange | ComputeChange]:
        """The changes that the measurements of an iteration verify; those of the first steps say nothing."""
        self.reported, self._reported = self._reported, []
        if self.job.is_starting(number):
            return []
        links = {event.link: event for event in self.reported if isinstance(event, Transfers)}
        stages = {(event.rank, event.stage): event for event in self.reported if isinstance(event, OpTimes)}
        news: list[LinkChange | ComputeChange | None] = [self._links[key].feed(links[key]) for key in sorted(links)]
        news += [self._stages[key].feed(stages[key]) for key in sorted(stages)]
        changes = self._told_apart(change for change in news if change is not None)
        risen = [each for each in changes if isinstance(each, LinkChange) and each.of_share and each.change.rose]
        for change in risen:
            if not self._own_wait(change.link, alone=1.0):  # messages of all links wait for cores
                self._links[change.link].take_for_usual()
                changes.remove(change)
        self._note(number, changes)
        self._forget(number)
        return changes

    def _note(self, number: int, news: Iterable[LinkChange | ComputeChange]) -> None:
        """Takes in links and stages that turned late, and drops those that are no longer late."""
        known = set(self._late)
        for change in news:
            before, after = change.change.before, change.change.after
            if isinstance(change, ComputeChange):
                key = change.stage, change.stage
            else:
                key = undirected(change.link)
                if change.of_share:
                    before, after = change.before.mean, change.after.mean
            if change.change.rose:
                least = min(before, self._late.get(key, (0.0, before))[1])
                self._late[key] = max(after, self._late.get(key, (0.0, 0.0))[0]), least
            else:
                self._late.pop(key, None)
        if set(self._late) - known:
            self.late_since = number

    def _forget(self, number: int) -> None:
        """Follows links that became later still. Drops links and stages not late for as long as a fall takes."""
        self._seen = {key: self._seen.get(key, number) for key in self._late}
        for key, (ms, before) in list(self._late.items()):
            if self._is_late(key):
                self._seen[key] = number
                level = self.level(key)
                if level > LATER * ms:  # it rose while its messages moved to another path
                    self._late[key] = level, before
            elif number - self._seen[key] >= USUAL.fall:
                del self._late[key]

    def again(self, changes: Iterable[LinkChange | ComputeChange]) -> list[LinkChange | ComputeChange]:
        """Changes of some iterations ago, with their causes as known by now."""
        return self._told_apart(
            self._links[each.link].again(each) if isinstance(each, LinkChange) else each for each in changes
        )

    def _told_apart(self, changes: Iterable[LinkChange | ComputeChange]) -> list[LinkChange | ComputeChange]:
        """If one direction of a link does not show the cause, the other one may."""
        news = list(changes)
        causes = {change.link: change.cause for change in news if isinstance(change, LinkChange)}
        for place, change in enumerate(news):
            if isinstance(change, LinkChange) and change.cause is Cause.DELAY:
                news[place] = replace(change, cause=causes.get(change.link[::-1], Cause.DELAY))
        return news

    def move(self, moved: Collection[Link]) -> None:
        """Messages of these links take the other path from now on, by delegates or their own."""
        self._delegated ^= set(moved)
        for link, watch in self._links.items():
            if undirected(link) in moved:
                self._known[link] = self._delays(link)
                watch.restart()

    def relocate(self, late: Mapping[Link, float]) -> None:
        """Every link joins other nodes from now on. All that is known of it is how late (ms) it is there."""
        for watch in self._links.values():
            watch.restart()
        self._known = {link: (late.get(undirected(link), 0.0),) for link in self._links}
        self._late = {key: each for key, each in self._late.items() if key[0] == key[1]}
        self.down.clear()

    def note_path(self, event: LinkDown | LinkUp) -> None:
        """Notes that a link's own path died or came back. Raises ControlError for a rank that is not there."""
        self.check_link(event.link)
        if self.job.may_delegate:
            (self.down.add if isinstance(event, LinkDown) else self.down.discard)(undirected(event.link))

    def check_link(self, link: Link) -> None:
        """Raises ControlError for a link of a rank that is not there."""
        if max(link) >= self.job.num_ranks:
            raise ControlError(f"link {show_link(link)}: ranks go from 0 to {self.job.num_ranks - 1}")

    def measured(self, now: Configuration, iteration_ms: float) -> Measured:
        """Links as they are while `now` runs, and the last iteration took so long."""
        late, down = self._not_absorbed(now), frozenset(self.down)
        # Where a link is not late, what some messages take longer is the wait for a core.
        waits = {link for link in self._links if undirected(link) in late}
        rows = {link: self._delays(link) if link in waits else (self._least(link),) for link in sorted(self._links)}
        busy = {link: min(self._busy(link), median(row)) for link, row in rows.items()}
        middle = {link: median(row) for link, row in rows.items()}
        if all(self._is_steady(link) for link in waits):
            links = Links({link: _laid((ms,), 0.0, busy[link]) for link, ms in middle.items()})
            return Measured((links,), Links(middle), Links(middle), late, down, self.factors)
        # Iterations by how late the links were in all, and some of them evenly picked to stand for all.
        length = max(map(len, rows.values()))
        ordered = sorted(range(length), key=lambda back: sum(row[-1 - back % len(row)] for row in rows.values()))
        picked = [ordered[(2 * part + 1) * length // (2 * _SCENARIOS)] for part in range(_SCENARIOS)]
        scenarios = tuple(
            Links(
                {link: _laid((self._times(link, back) if link in waits else ()) or row[-1:], iteration_ms, busy[link])
                 for link, row in rows.items()}
            )
            for back in dict.fromkeys(picked)
        )  # fmt: skip
        harshest = Links({link: max(row) for link, row in rows.items()})
        return Measured(scenarios, Links(middle), harshest, late, down, self.factors)

    def latest(self, iteration_ms: float) -> LinksOfStep:
        """The links of the latest iteration, which took so long."""
        found = {}
        for link in self._links:
            times = self._times(link, 0) or self._delays(link)[-1:]
            found[link] = times, min(self._busy(link), fmean(times))
        return LinksOfStep(found, iteration_ms)

    def level(self, key: Link) -> float:
        """The least delay (ms) of a link since its last verified change, in its slower direction; 0 for a stage."""
        return max((self._links[way].level for way in (key, key[::-1]) if way in self._links), default=0.0)

    def are_there(self, keys: Collection[Link]) -> bool:
        """Whether the latest iteration shows one of these that are late."""
        return any(self._is_late(key) for key in keys if key in self._late)

    def _is_late(self, key: Link) -> bool:
        """Whether the latest iteration of a late link, in either direction, or of a slow stage is nearer to its late
        level than to the level before.
        """
        bound = fmean(self._late[key])
        if key[0] == key[1]:
            totals = (watch.latest for (_, stage), watch in self._stages.items() if stage == key[0])
            return any(total is not None and total >= bound for total in totals)
        rows = (self._links[way].times(0) for way in (key, key[::-1]) if way in self._links)
        return any(row and fmean(row) >= bound for row in rows)

    def _not_absorbed(self, now: Configuration) -> frozenset[Link]:
        """The links that became later, and those whose delay (ms) the schedule's slack does not absorb by Eq. 1.

        A link that is as late as it always was is not late where the least slack of Algorithm 2 would absorb it.
        """
        costs = scaled(self.job.costs, self.factors)
        try:
            absorbed = tolerances(now.schedule, costs)
        except ScheduleError:  # more than one stage a rank: a mean op stands for Eq. 1
            absorbed = {}
        found = set(self.rises)
        for link in self._links:
            key, least = undirected(link), self.job.mean_op
            if absorbed:
                least = max(absorbed.get(key, least), tolerance(costs, min(key), MIN_SLACK))
            if self._least(link) + self._own_wait(link) > max(least, self.job.smallest_delay):
                found.add(key)
        return frozenset(found)

    def _own_wait(self, link: Link, alone: float = 0.0) -> float:
        """How much longer (ms) than the least delay a message of a link takes because of the link.

        Ranks that share cores make messages wait on all links, so the link with the shortest waits in the same
        iterations says how long these are. A link that is `alone` in a job can't be compared.
        """
        num, waits = len(self._delays(link)), dict[Link, float]()
        for way in self._links:
            wait = median(self._delays(way)[-num:]) - self._least(way)
            waits[undirected(way)] = max(wait, waits.get(undirected(way), 0.0))
        own = waits.pop(undirected(link))
        return max(0.0, own - _WAIT * min(waits.values())) if waits else alone

    def _busy(self, link: Link) -> float:
        """How long the link is busy with a message (ms). If this direction does not show it, the other may. Where
        lines carry one message at a time, that they are busy says nothing of what is below them.
        """
        if self.job.transport == NCCL_EDGE and undirected(link) not in self._delegated:
            return 0.0
        found = self._links[link].busy
        other = self._links.get(link[::-1])
        if found is None and other is not None and other.busy:
            found = other.busy * self._links[link].level / other.level if other.level else None
        return found or 0.0

    def _least(self, link: Link) -> float:
        """The delay (ms) that all messages of a link have."""
        return self._links[link].level if self._links[link].reports else min(self._delays(link))

    def _delays(self, link: Link) -> tuple[float, ...]:
        """The mean delay (ms) of each recent iteration."""
        return tuple(fmean(report.ms) for report in self._links[link].reports) or self._known.get(link, (0.0,))

    def _times(self, link: Link, back: int) -> tuple[float, ...]:
        """Delays of the messages of an iteration, `back` iterations ago.

        The first messages on a line of gloo also wait for news of their receives. The simulation adds this wait by
        itself, so these count as usual ones here.
        """
        row = self._links[link].times(back)
        if self.job.transport != GLOO or undirected(link) in self._delegated or not row:
            return row
        usual = median(row)
        first = next(at for at, delay in enumerate(row) if delay <= usual)
        return (usual,) * first + row[first:]

    def _is_steady(self, link: Link) -> bool:
        """Whether the link's delay differs little, from message to message and iteration to iteration."""
        row, single = self._delays(link), self._links[link].times(0)
        bound = max(self.job.smallest_delay, USUAL.share * median(row))
        return deviation(row) <= bound and (not single or deviation(single) <= bound)


def _laid(delays: Sequence[float], ms: float, busy: float) -> LinkCondition:
    """A link whose messages had these delays, spread evenly over an iteration of `ms`."""
    late = tuple(max(0.0, delay - busy) for delay in delays)
    step = ms / len(delays)
    times = tuple(step * at for at in range(len(delays)))
    return LinkCondition(Trace(times, late) if step > 0 else Constant(late[0]), Constant(busy))
