"""What is known of one direction of a link: how late its messages are, why, and when that changed.

A message of size n takes `latency + n / bandwidth`, and longer where packets were lost. Latency and bandwidth can be
told apart only where messages of different sizes passed; loss shows as a share of messages far above the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median

from penstock.control.changes import Change, Detector, Watch
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
    """One direction of a link during some iterations.

    Attributes:
        delay: median time of a message by itself, in ms.
        mean: mean time of a message, in ms, late ones included.
        late_share: share of messages that took far longer than others of their size, as lost packets cause it.
        by_size: the part of `delay`, in ms, that grows with a message's size; None where sizes do not tell.
        busy: the part of `delay`, in ms, during which the link is busy with the message, so that later ones wait;
            None where neither sizes nor messages under way together tell.
        held: share of messages that arrived together with the one before, as lost packets cause it in a stream.
    """

    delay: float
    mean: float
    late_share: float
    by_size: float | None
    busy: float | None
    held: float


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


def estimate(reports: Sequence[Transfers], least: float = 0.0) -> LinkEstimate:
    """Estimates one direction of a link from what its receiver reports of some iterations.

    What grows with size is told by the median slope through the median of each size, so outliers do not move it.

    Args:
        reports: one of each iteration.
        least: the smallest difference that matters, in ms.
    """
    messages = [message for report in reports for message in report.messages]
    times = [ms for _, ms in messages]
    rows: dict[float, list[float]] = {}
    for size, ms in messages:
        rows.setdefault(size, []).append(ms)
    middle = {size: median(each) for size, each in sorted(rows.items())}
    points = [(size, ms) for size, ms in middle.items() if len(rows[size]) >= _FEWEST]
    by_size = None
    if len(points) > 1 and points[-1][0] >= _LEAST_SPREAD * points[0][0]:
        by_size = max(0.0, slope(points) or 0.0) * median(size for size, _ in messages)
    rests = [ms - middle[size] for size, ms in messages]
    bound = max(LATE * deviation(rests), 0.5 * median(times), least)
    late = sum(rest > bound for rest in rests) / len(rests)
    busy = _busy(reports)
    held = fmean(report.held for report in reports)
    return LinkEstimate(median(times), fmean(times), late, by_size, by_size if busy is None else busy, held)


def _busy(reports: Iterable[Transfers]) -> float | None:
    """How long the link was busy with a message (ms) in the median iteration that tells."""
    measured = [report.busy for report in reports if report.busy is not None]
    return median(measured) if measured else None


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
    if after.by_size is not None and before.by_size is not None and after.by_size - before.by_size > abs(rise) / 2:
        return Cause.BANDWIDTH
    if after.busy is None:
        return Cause.DELAY
    return Cause.OCCUPANCY if abs(after.busy - (before.busy or 0.0)) > abs(rise) / 2 else Cause.LATENCY


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
            return (
                f"{after:.0%} of the messages of link {show_link(self.link)} are late instead of {before:.0%} (loss)"
            )
        return f"messages of link {show_link(self.link)} take {after:.3g} ms instead of {before:.3g} ({self.cause})"


def looked_at_again(change: LinkChange, now: LinkEstimate | None) -> LinkChange:
    """The change, with its cause determined again from what is known now."""
    if now is None or change.cause is Cause.LOSS:
        return change
    return replace(change, cause=cause_of(change.before, now))


class LinkWatch(Watch[Transfers, LinkChange]):
    """Follows one direction of a link by what its receiver reports."""

    def __init__(self, link: Link, least: float, num_updates: int = 1) -> None:
        super().__init__(Detector(least))
        self.link = link
        self._num_updates = num_updates
        self._least = least
        self._late = Detector(LATE_SHARE)
        self.detectors = self.detector, self._late
        self._counted = 0, 0

    @property
    def level(self) -> float:
        """Median delay (ms) since the last verified change; 0 before anything was measured."""
        return self.detector.level or 0.0

    @property
    def busy(self) -> float | None:
        """How long the link is busy with a message (ms) since the last verified change; None if unknown."""
        return _busy(self.reports)

    @property
    def delays(self) -> list[float]:
        """Mean delay of each iteration (ms) since the last verified change, latest last."""
        return [fmean(report.ms) for report in self.reports]

    def estimate(self) -> LinkEstimate | None:
        """What is known since the last verified change; None before the first message."""
        return estimate(self.reports, self._least) if self.reports else None

    def times(self, back: int) -> tuple[float, ...]:
        """The times (ms) of one iteration's messages, in order; `back` is 0 for the latest."""
        return self.reports[-1 - back % len(self.reports)].ms if self.reports else ()

    def restart(self) -> None:
        """Forgets everything, because messages take another path from now on."""
        for detector in self.detectors:
            detector.restart()
        self._counted = 0, 0
        self._now = None
        self.reports.clear()

    def _suspect(self, report: Transfers) -> tuple[Change, int] | None:
        single = [ms for each in self.reports for ms in each.ms]
        spread = deviation(single) if single else 0.0
        bound = self.level + max(self._least, 0.5 * self.level, LATE * spread)
        found, parts = None, _parts(report.ms, self._num_updates)
        self._is_loss = False
        for part in parts:
            change = self.detector.feed(median(part))
            if change is not None:
                found, self._is_loss = change, False
                self._late.restart()
            elif self.detector.pending == 0 and self.reports:  # many messages above the level that stays are loss
                late = self._count_late(part, bound)
                if late is not None:
                    found, self._is_loss = late, True
        return None if found is None else (found, len(parts))

    def _verified(
        self, change: Change, num_iterations: int, before: Sequence[Transfers], after: Sequence[Transfers]
    ) -> LinkChange:
        old, new = estimate(before, self._least), estimate(after, self._least)
        cause = Cause.LOSS if self._is_loss else cause_of(old, new)
        return LinkChange(self.link, change, cause, num_iterations, old, new, self._is_loss)

    def _count_late(self, times: Sequence[float], bound: float) -> Change | None:
        """Takes the share of late messages, once there are enough for it to mean something."""
        late, num = self._counted
        late, num = late + sum(ms > bound for ms in times), num + len(times)
        if num < COUNTED:
            self._counted = late, num
            return None
        self._counted = 0, 0
        return self._late.feed(late / num)


def _parts(times: Sequence[float], num_updates: int) -> list[Sequence[float]]:
    """The iteration's first and second half; as many parts as those of its steps, where it has updates in it; the
    whole iteration twice if it is too short to be divided.
    """
    num = 2 * max(1, min(num_updates, len(times) // _STEP))
    cuts = [len(times) * part // num for part in range(num + 1)]
    return [times[a:b] for a, b in pairwise(cuts)] if len(times) > num + 1 else [times, times]
