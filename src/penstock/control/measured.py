"""What is known of all links and all stages together, on which the controller's choice is based.

Transfer, Transfers ---> one LinkWatch per direction  ---+
OpTimes             ---> one ComputeWatch per stage   ---+---> changes, and `Measured`: links and costs as they are
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from penstock.control.candidate import Measured, late_links
from penstock.control.changes import Sensitivity
from penstock.control.compute import ComputeChange, ComputeWatch, Factors
from penstock.control.configuration import Job
from penstock.control.errors import ControlError
from penstock.control.events import Link, OpTimes, Transfer, Transfers, show_link, undirected
from penstock.control.link import Cause, LinkChange, LinkEstimate, LinkWatch, looked_at_again
from penstock.control.robust_statistics import AS_DEVIATION, deviation
from penstock.cost import LinkCondition, Links
from penstock.cost.over_time import Constant, Trace

_SCENARIOS = 3
"""Iterations that represent all, if delays differ from one iteration to the next."""
_RECENT = 32
"""Iterations from which the variation of their times is computed."""


@dataclass(frozen=True)
class LinksOfStep:
    """What was measured of links in one step.

    Attributes:
        rows: by direction, the delay of each message and how long the link is busy with one, in ms.
        ms: what the step took.
    """

    rows: Mapping[Link, tuple[tuple[float, ...], float]]
    ms: float

    @property
    def least(self) -> Mapping[Link, float]:
        """The smallest delay (ms) of a message, by direction."""
        return {link: min(delays) for link, (delays, _) in self.rows.items()}

    def links(self, sooner: Mapping[Link, float]) -> Links:
        """As conditions.

        Args:
            sooner: by how many ms links, each named by its lower rank first, are less late than measured.
        """
        found = {}
        for link, (delays, busy) in self.rows.items():
            less = sooner.get(undirected(link), 0.0)
            found[link] = _laid([max(0.0, delay - less) for delay in delays] if less else delays, self.ms, busy)
        return Links(found)


class JobMonitor:
    """All watches of a job.

    Attributes:
        down: links whose own path is dead.
    """

    def __init__(self, job: Job, sensitivity: Sensitivity) -> None:
        self.job, self.sensitivity = job, sensitivity
        self.down: set[Link] = set()
        self._links: dict[Link, LinkWatch] = {}
        self._stages: dict[tuple[int, int], ComputeWatch] = {}
        self._known: dict[Link, tuple[float, ...]] = {}
        self._times: deque[float] = deque(maxlen=_RECENT)

    @property
    def alarms(self) -> tuple[int, ...]:
        """How many changes were suspected so far, how many of these were verified, and how many came to nothing."""
        found = [each for watch in self._links.values() for each in watch.detectors]
        found += [watch.detector for watch in self._stages.values()]
        return tuple(map(sum, zip((0, 0, 0), *(each.alarms for each in found), strict=True)))

    @property
    def estimates(self) -> Mapping[Link, LinkEstimate]:
        """What is known of each direction of each link since its last verified change."""
        found = {link: watch.estimate() for link, watch in sorted(self._links.items())}
        return {link: estimate for link, estimate in found.items() if estimate is not None}

    @property
    def factors(self) -> Factors:
        """How many times as long ops take as the job's costs say, where they changed."""
        return tuple(
            (stage, kind, factor)
            for (_, stage), watch in sorted(self._stages.items())
            for kind, factor in sorted(watch.factors.items())
        )

    def feed(self, event: Transfer | Transfers | OpTimes) -> None:
        """Takes a measurement. Raises ControlError for a rank or a stage that is not there."""
        if isinstance(event, OpTimes):
            self._stage(event).feed(event)
            return
        if event.link not in self._links:
            self.check_link(event.link)
            self._links[event.link] = LinkWatch(
                event.link, self.job.smallest_delay, self.sensitivity, self.job.num_updates
            )
        self._links[event.link].feed(event)

    def end_iteration(self, ms: float) -> list[LinkChange | ComputeChange]:
        """The changes that the measurements of an iteration of `ms` verify. If one direction of a link does not show
        the cause, the other one may.
        """
        news: list[LinkChange | ComputeChange] = []
        self._times.append(ms)
        least = self._least()
        for _, link in sorted(self._links.items()):
            if change := link.end_iteration(least):
                news.append(change)
        for _, stage in sorted(self._stages.items()):
            if slower := stage.end_iteration():
                news.append(slower)
        causes = {change.link: change.cause for change in news if isinstance(change, LinkChange)}
        return [
            replace(change, cause=causes.get(change.link[::-1], Cause.DELAY))
            if isinstance(change, LinkChange) and change.cause is Cause.DELAY
            else change
            for change in news
        ]

    def again(self, change: LinkChange | ComputeChange) -> LinkChange | ComputeChange:
        """A change of some iterations ago, with its cause as known by now."""
        return (
            looked_at_again(change, self._links[change.link].estimate()) if isinstance(change, LinkChange) else change
        )

    def move(self, moved: Collection[Link], delegated: Collection[Link]) -> None:
        """Messages of the links in `moved` take another path from now on. Until now those of the links in `delegated`
        went through delegates.
        """
        for link, watch in self._links.items():
            if undirected(link) in moved:
                self._known[link] = self._delays(link, delegated)
                watch.restart()

    def relocate(self, late: Mapping[Link, float]) -> None:
        """Every link joins other nodes from now on. All that is known of it is how late (ms) it is there."""
        for watch in self._links.values():
            watch.restart()
        self._known = {link: (late.get(undirected(link), 0.0),) for link in self._links}
        self.down.clear()

    def check_link(self, link: Link) -> None:
        """Raises ControlError for a link of a rank that is not there."""
        if max(link) >= self.job.num_ranks:
            raise ControlError(f"link {show_link(link)}: ranks go from 0 to {self.job.num_ranks - 1}")

    def measured(self, delegated: Collection[Link], iteration_ms: float) -> Measured:
        """Links as they are while those in `delegated` go by delegates, and the last iteration took so long."""
        rows = {link: self._delays(link, delegated) for link in sorted(self._links)}
        busy = {link: min(self._busy(link), median(row)) for link, row in rows.items()}
        middle = {link: median(row) for link, row in rows.items()}
        late, down = late_links(middle, self.job.smallest_delay), frozenset(self.down)
        if all(self._is_steady(link, delegated) for link in rows):
            steady = {link: _condition(ms, busy[link]) for link, ms in middle.items()}
            links = Links(steady) if any(busy.values()) else Links(middle)
            return Measured((links,), Links(middle), Links(middle), late, down, self.factors)
        # Iterations by how late the links were in all, and some of them evenly picked to stand for all.
        length = max(map(len, rows.values()))
        ordered = sorted(range(length), key=lambda back: sum(row[-1 - back % len(row)] for row in rows.values()))
        picked = [ordered[(2 * part + 1) * length // (2 * _SCENARIOS)] for part in range(_SCENARIOS)]
        scenarios = tuple(
            Links(
                {link: self._scenario(link, row, back, delegated, iteration_ms, busy[link])
                 for link, row in rows.items()}
            )
            for back in dict.fromkeys(picked)
        )  # fmt: skip
        harshest = Links({link: max(row) for link, row in rows.items()})
        return Measured(scenarios, Links(middle), harshest, late, down, self.factors)

    def latest(self, delegated: Collection[Link], iteration_ms: float) -> LinksOfStep:
        """The links of the latest iteration, which took so long."""
        found = {}
        for link, watch in self._links.items():
            times = self._own(link, watch.times(0), delegated) or self._delays(link, delegated)[-1:]
            found[link] = times, min(self._busy(link), fmean(times))
        return LinksOfStep(found, iteration_ms)

    def is_late(self, key: Link, bound: float) -> bool:
        """Whether the latest iteration has a link late, in either direction, or a stage slow, by `bound` ms or more.
        A stage is named like a link to itself."""
        if key[0] == key[1]:
            totals = (watch.latest for (_, stage), watch in self._stages.items() if stage == key[0])
            return any(total is not None and total >= bound for total in totals)
        rows = (self._links[way].times(0) for way in (key, key[::-1]) if way in self._links)
        return any(row and fmean(row) >= bound for row in rows)

    def _least(self) -> float:
        """The smallest delay (ms) that can be a cause. If each microbatch pays a delay there and back, and it still
        does not show above the noise of an iteration, it is not a cause.
        """
        if self.job.least_delay is not None or not self._times:
            return 0.0
        middle = median(self._times)
        noise = AS_DEVIATION * median(abs(ms - middle) for ms in self._times)
        return noise / (2 * self.job.start.schedule.num_microbatches)

    def _stage(self, event: OpTimes) -> ComputeWatch:
        key = event.rank, event.stage
        if key not in self._stages:
            if event.rank >= self.job.num_ranks or event.stage >= self.job.costs.num_stages:
                raise ControlError(
                    f"ops of rank {event.rank}, stage {event.stage}: ranks go from 0 to {self.job.num_ranks - 1}, "
                    f"stages to {self.job.costs.num_stages - 1}"
                )
            self._stages[key] = ComputeWatch(*key, self.job.smallest_delay, self.sensitivity)
        return self._stages[key]

    def _busy(self, link: Link) -> float:
        """How long the link is busy with a message (ms). If this direction does not show it, the other may."""
        found = self._links[link].busy
        other = self._links.get(link[::-1])
        if found is None and other is not None and other.busy:
            found = other.busy * self._links[link].level / other.level if other.level else None
        return found or 0.0

    def _own(self, link: Link, delays: Sequence[float], delegated: Collection[Link]) -> tuple[float, ...]:
        """Delays of the link's own path, without what delegates add."""
        added = self.job.delegate_ms if undirected(link) in delegated else 0.0
        return tuple(max(0.0, delay - added) for delay in delays)

    def _delays(self, link: Link, delegated: Collection[Link]) -> tuple[float, ...]:
        """Recent delays of the link's own path, one per iteration."""
        return self._own(link, self._links[link].delays, delegated) or self._known.get(link, (0.0,))

    def _is_steady(self, link: Link, delegated: Collection[Link]) -> bool:
        """Whether the link's delay differs little, from message to message and iteration to iteration."""
        row, single = self._delays(link, delegated), self._links[link].times(0)
        bound = max(self.job.smallest_delay, self.sensitivity.share * median(row))
        return deviation(row) <= bound and (not single or deviation(single) <= bound)

    def _scenario(
        self, link: Link, row: Sequence[float], back: int, delegated: Collection[Link], ms: float, busy: float
    ) -> LinkCondition:
        """The link as it was `back` iterations ago: the delays of its messages, spread evenly over an
        iteration of `ms`.
        """
        return _laid(self._own(link, self._links[link].times(back), delegated) or (row[-1],), ms, busy)


def _laid(delays: Sequence[float], ms: float, busy: float) -> LinkCondition:
    """A link whose messages had these delays, spread evenly over an iteration of `ms`."""
    late = tuple(max(0.0, delay - busy) for delay in delays)
    step = ms / len(delays)
    times = tuple(step * at for at in range(len(delays)))
    return LinkCondition(Trace(times, late) if step > 0 else Constant(late[0]), Constant(busy))


def _condition(ms: float, busy: float) -> LinkCondition:
    return LinkCondition(Constant(max(0.0, ms - busy)), Constant(busy))
