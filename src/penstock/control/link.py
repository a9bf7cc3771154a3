"""What is known of one direction of a link: how late its messages are, why, and when that changed.

A message of size n takes `latency + n / bandwidth`, and longer where packets were lost. Latency and bandwidth can be
told apart only where messages of different sizes passed; loss shows as a share of messages far above the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median

from penstock.control.changes import Change, Detector, Sensitivity
from penstock.control.events import Link, Transfers, show_link
from penstock.control.robust_statistics import deviation, slope


class Cause(StrEnum):
    """Why a link is late, as far as its messages tell.

    What helps differs: against latency more slack, and more receives posted; against a busy link less volume, or
    another path; against loss another path.

    Examples:
        >>> import penstock as ps
        >>> [cause.value for cause in ps.control.Cause]
        ['latency', 'bandwidth', 'occupancy', 'loss', 'delay']
    """

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    OCCUPANCY = "occupancy"
    """The link is busy with each message: because of its size, or for another reason that equal sizes do not show."""
    LOSS = "loss"
    DELAY = "delay"
    """Latency, bandwidth or occupancy: sizes are equal, and too few messages were under way together to tell
    which.
    """


_STEP = 16
"""Messages that a step has at least, in an iteration of several: half of them still tell how late they are."""


@dataclass(frozen=True)
class LinkEstimate:
    """One direction of a link since its last verified change.

    Attributes:
        delay: median time of a message by itself, in ms.
        mean: mean time of a message, in ms, late ones included.
        latency: the part that does not grow with size, in ms; None where sizes do not tell the two parts apart.
        bandwidth: bytes per second; None where sizes do not tell, inf where size makes no difference.
        late_share: share of messages that took far longer than others of their size, as lost packets cause it.
        num_messages: how many messages this rests on.
        busy: the part of `delay`, in ms, during which the link is busy with the message, so that later ones wait;
            None where neither sizes nor messages under way together tell.
        held: share of messages that arrived together with the one before, as lost packets cause it in a stream.

    Examples:
        >>> import penstock as ps
        >>> found = ps.control.estimate([(1e6, 1.0), (2e6, 2.0)] * 4)
        >>> found.num_messages, round(found.bandwidth / 1e9, 2)
        (8, 1.0)
    """

    delay: float
    mean: float
    latency: float | None
    bandwidth: float | None
    late_share: float
    num_messages: int
    busy: float | None = None
    held: float = 0.0


_LEAST_SPREAD = 1.5
"""Largest size divided by smallest from which on latency and bandwidth are told apart."""
_FEWEST = 3
"""Messages of one size that a fit takes into account."""
LATE = 8.0
"""Deviations above its expected time from which on a message counts as late."""
COUNTED = 16
"""Messages over which the share of late ones is counted. One of four would say little."""
LATE_SHARE = 0.15
"""Share of late messages that indicates loss, if it lasts for several iterations. 1% of wild values stays far
below.
"""


def estimate(
    messages: Sequence[tuple[float, float]],
    least: float = 0.0,
    busy: Sequence[float | None] = (),
    held: Sequence[float] = (),
) -> LinkEstimate:
    """Estimates one direction of a link from its messages.

    The fit runs through the median of each size, with the median slope, so outliers do not move it. If `busy` and
        `held` do not tell how long the link is busy with a message, sizes do.

    Args:
        messages: of each message its bytes and the ms that it took.
        least: the smallest difference that matters, in ms.
        busy: ms for which each iteration found the link busy with a message, see `Transfers`; None where it did not
            tell.
        held: share of messages of each iteration that arrived together with the one before, see `Transfers`.

    Examples:
        >>> import penstock as ps
        >>> found = ps.control.estimate([(1e6, 31.0), (2e6, 32.0)] * 4)
        >>> round(found.latency), found.late_share
        (30, 0.0)
    """
    times = [ms for _, ms in messages]
    rows: dict[float, list[float]] = {}
    for size, ms in messages:
        rows.setdefault(size, []).append(ms)
    points = [(size, median(each)) for size, each in sorted(rows.items()) if len(each) >= _FEWEST]
    latency = bandwidth = None
    per_byte = 0.0
    if len(points) > 1 and points[-1][0] >= _LEAST_SPREAD * points[0][0]:
        per_byte = max(0.0, slope(points) or 0.0)
        latency = max(0.0, median(ms - per_byte * size for size, ms in points))
        bandwidth = 1e3 / per_byte if per_byte > 0 else float("inf")
    if latency is None:
        middle = {size: median(each) for size, each in rows.items()}
        rests = [ms - middle[size] for size, ms in messages]
    else:
        rests = [ms - latency - per_byte * size for size, ms in messages]
    bound = max(LATE * deviation(rests), 0.5 * median(times), least)
    late = sum(rest > bound for rest in rests) / len(rests)
    measured = [each for each in busy if each is not None]
    by_size = None if latency is None else per_byte * median(size for size, _ in messages)
    together = fmean(held) if held else 0.0
    long = median(measured) if measured else by_size
    return LinkEstimate(median(times), fmean(times), latency, bandwidth, late, len(times), long, together)


def cause_of(before: LinkEstimate, after: LinkEstimate) -> Cause:
    """What changed most about a link between two estimates.

    It is loss if messages far above the others make up most of the change, or hold up others. Otherwise it is what
    explains more of the change of a message of median time: latency, or how long the link is busy with it.
    """
    rise = after.delay - before.delay
    in_late = (after.mean - after.delay) - (before.mean - before.delay)
    if abs(after.late_share - before.late_share) >= LATE_SHARE / 2 and abs(in_late) > abs(rise):
        return Cause.LOSS
    if after.held - before.held >= LATE_SHARE:
        return Cause.LOSS
    by_latency = None
    if after.latency is not None and before.latency is not None:
        by_latency = after.latency - before.latency
        if abs(by_latency) < abs(rise - by_latency):
            return Cause.BANDWIDTH
    if after.busy is None:
        return Cause.DELAY
    if abs(after.busy - (before.busy or 0.0)) > abs(rise) / 2:
        return Cause.OCCUPANCY
    return Cause.LATENCY


@dataclass(frozen=True)
class LinkChange:
    """A verified change of one direction of a link.

    Attributes:
        link: the link, as (from, to).
        change: the levels before and after, in ms, or shares of late messages.
        cause: what it is attributed to, see `Cause`.
        num_iterations: iterations since it began.
        before: the estimate before.
        after: the estimate since.
        of_share: whether the levels are shares of late messages.

    Examples:
        >>> import penstock as ps
        >>> estimate = ps.control.estimate([(1e6, 1.0)] * 8)
        >>> slower = ps.control.estimate([(1e6, 61.0)] * 8)
        >>> change = ps.control.Change(before=1.0, after=61.0, began=3)
        >>> news = ps.control.LinkChange((2, 3), change, ps.control.Cause("latency"), 2, estimate, slower)
        >>> news.cause.value, news.after.delay - news.before.delay
        ('latency', 60.0)
    """

    link: Link
    change: Change
    cause: Cause
    num_iterations: int
    before: LinkEstimate
    after: LinkEstimate
    of_share: bool = False

    def __str__(self) -> str:
        before, after = self.change.before, self.change.after
        if self.of_share:
            return f"link {show_link(self.link)}: late messages {before:.0%} -> {after:.0%} (loss)"
        return f"link {show_link(self.link)}: {before:.3g} -> {after:.3g} ms ({self.cause})"


def looked_at_again(change: LinkChange, now: LinkEstimate | None) -> LinkChange:
    """The change, with its cause determined again from what is known now."""
    if now is None or change.cause is Cause.LOSS:
        return change
    return replace(change, cause=cause_of(change.before, now))


class LinkWatch:
    """Collects one direction's messages, iteration by iteration.

    Attributes:
        delays: mean delay of each iteration (ms) since the last verified change, latest last.
        age: iterations since then.
        detectors: of the delay, and of the share of late messages.
    """

    MESSAGES, ITERATIONS = 512, 16

    def __init__(self, link: Link, least: float, sensitivity: Sensitivity, num_updates: int = 1) -> None:
        self.link = link
        self._num_updates = num_updates
        self._least = least
        self._delay = Detector(least, sensitivity)
        self._late = Detector(LATE_SHARE, sensitivity)
        self.detectors = self._delay, self._late
        self._now: list[tuple[float, float]] = []
        self._told_now: tuple[float | None, float] = None, 0.0
        self._regime: deque[list[tuple[float, float]]] = deque(maxlen=self.ITERATIONS)
        self._told: deque[tuple[float | None, float]] = deque(maxlen=self.ITERATIONS)
        self._counted = 0, 0
        self.delays: deque[float] = deque(maxlen=self.ITERATIONS)
        self.age = 0

    @property
    def level(self) -> float:
        """Median delay (ms) since the last verified change; 0 before anything was measured."""
        return self._delay.level or 0.0

    @property
    def busy(self) -> float | None:
        """How long the link is busy with a message (ms) since the last verified change; None if unknown."""
        measured = [busy for busy, _ in self._told if busy is not None]
        return median(measured) if measured else None

    def feed(self, transfers: Transfers) -> None:
        """Takes all messages of an iteration."""
        self._now += zip(transfers.num_bytes, transfers.ms, strict=True)
        self._told_now = transfers.busy, transfers.held

    def end_iteration(self) -> LinkChange | None:
        """Takes the iteration's messages together; returns the change they verify, if they do."""
        if not self._now:
            return None
        messages, self._now = self._now, []
        reported, self._told_now = self._told_now, (None, 0.0)
        times = [ms for _, ms in messages]
        bound = self.level + max(self._least, 0.5 * self.level, LATE * self._spread())
        found, loss = None, False
        parts = _parts(times, self._num_updates)
        for half in parts:
            change = self._delay.feed(median(half))
            if change is not None:
                found, loss = change, False
                self._late.restart()
            elif self._delay.pending == 0 and self.age:  # many messages above the level, where that stays, are loss
                late = self._count_late(half, bound)
                if late is not None:
                    found, loss = late, True
        self._regime.append(messages)
        self._told.append(reported)
        self.delays.append(fmean(times))
        self.age += 1
        if found is None:
            return None
        # What was counted in parts began in the iteration of the first of them.
        began = min(-(-found.began // len(parts)), len(self._regime))
        rows = list(self._regime)
        before = [m for row in rows[:-began] for m in row] or messages
        after = [m for row in rows[-began:] for m in row]
        old, new = self._estimate(before, 0, len(rows) - began), self._estimate(after, len(rows) - began, len(rows))
        self._keep_last(began)
        return LinkChange(self.link, found, Cause.LOSS if loss else cause_of(old, new), began, old, new, loss)

    def estimate(self) -> LinkEstimate | None:
        """What is known since the last verified change; None before the first message."""
        messages = [m for row in self._regime for m in row][-self.MESSAGES :]
        return self._estimate(messages, 0, len(self._told)) if messages else None

    def _estimate(self, messages: Sequence[tuple[float, float]], first: int, last: int) -> LinkEstimate:
        """From messages of the iterations `first` to `last - 1`."""
        reported = list(self._told)[first:last]
        return estimate(messages, self._least, [busy for busy, _ in reported], [held for _, held in reported])

    def times(self, back: int) -> tuple[float, ...]:
        """The times (ms) of one iteration's messages, in order; `back` is 0 for the latest."""
        return tuple(ms for _, ms in self._regime[-1 - back % len(self._regime)]) if self._regime else ()

    def restart(self) -> None:
        """Forgets everything, because messages take another path from now on."""
        self._delay.restart()
        self._late.restart()
        self._now, self._told_now = [], (None, 0.0)
        self._counted = 0, 0
        self._keep_last(0)

    def _spread(self) -> float:
        """The deviation (ms) of single messages since the last verified change."""
        times = [ms for row in self._regime for _, ms in row]
        return deviation(times) if times else 0.0

    def _count_late(self, times: Sequence[float], bound: float) -> Change | None:
        """Takes the share of late messages, once there are enough for it to mean something."""
        late, num = self._counted
        late, num = late + sum(ms > bound for ms in times), num + len(times)
        if num < COUNTED:
            self._counted = late, num
            return None
        self._counted = 0, 0
        return self._late.feed(late / num)

    def _keep_last(self, count: int) -> None:
        for row in (self._regime, self._told, self.delays):
            while len(row) > count:
                row.popleft()
        self.age = count


def _parts(times: list[float], num_updates: int) -> list[list[float]]:
    """The iteration's first and second half; as many parts as those of its steps, where it has updates in it; the
    whole iteration twice if it is too short to be divided.
    """
    num = 2 * max(1, min(num_updates, len(times) // _STEP))
    cuts = [len(times) * part // num for part in range(num + 1)]
    return [times[a:b] for a, b in pairwise(cuts)] if len(times) > num + 1 else [times, times]
