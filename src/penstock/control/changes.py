"""Change points of one measured number: suspected after two numbers in a row, and verified by those that follow.

    ms
     |                  x  x  x  x  x
     |        x
     | - - - - - - - - - - - - - - - - - - - - - - - -  level + max(5 deviations, 10%, what matters at all)
     | x  x      x  x                  x  x  x ... x
     +------------------------------------------------- half iterations
              |            |  |           |        |
            noise     suspected       suspected    12 in a row: verified, it fell
                              3 in a row: verified, it rose

The level is the median since the last verified change, and the deviation comes from the middle of the values. So a
single wild value moves neither. A rise that does not double the level needs more evidence than one that does, since
waiting costs less. A fall needs most evidence: to give up a remedy too early costs more than to keep it a while. Each
time the number rises again soon after it fell, the next fall needs twice as many.

Medians and deviations here are those that a few wild values do not change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

AS_DEVIATION = 1.4826
"""Median absolute deviation times this is the standard deviation, where noise is normal."""
TENTHS_APART = 2.5631
"""How many standard deviations lie between the first and the last tenth, where noise is normal."""


def deviation(values: Sequence[float]) -> float:
    """The standard deviation, estimated from the middle of the values; 0 for one value.

    It is the larger of two: one follows from the median absolute deviation, which half of the values may not move.
    The other follows from the distance between the first and the last tenth, which shows values that keep jumping
    between two levels.
    """
    middle = median(values)
    tenth, ordered = len(values) // 10, sorted(values)
    span = ordered[-1 - tenth] - ordered[tenth] if len(values) >= 10 else 0.0
    return max(AS_DEVIATION * median(abs(value - middle) for value in values), span / TENTHS_APART)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The middle of the slopes between all pairs of points with different x (Theil and Sen); None without any."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for at, a in enumerate(points) for b in points[at + 1 :] if a[0] != b[0]]
    return median(slopes) if slopes else None


SUSPICIOUS = 2
"""Numbers in a row after which a change is suspected. A single one is usually noise."""
DEVIATIONS = 5.0
"""A change is larger than this many deviations."""
MOST_FALL = 192
"""Numbers in a row that verify a fall, at most: what doubling `Sensitivity.fall` ends at."""
Report = TypeVar("Report")
Verified = TypeVar("Verified")


@dataclass(frozen=True)
class Sensitivity:
    """When a number counts as changed.

    Attributes:
        share: a change is larger than this share of the level (0.1 is that of Greyhound, arXiv 2410.12588).
        rise, small_rise, fall: how many numbers in a row verify a rise that at least doubles the level, another
            rise, a fall. A link gives two an iteration, so three mean that one iteration is never enough, and that
            the second is where the first was slow for half of it; five are within three iterations.
        calibration: numbers after a start or a verified change before another may be suspected.
    """

    share: float = 0.1
    rise: int = 3
    small_rise: int = 5
    fall: int = 12
    calibration: int = 6


USUAL = Sensitivity()
"""That of links and ops."""


@dataclass(frozen=True)
class Change:
    """A verified change of a number that a `Detector` watches.

    Attributes:
        before: the level before, in the unit of the numbers.
        after: the level since.
        began: how many numbers ago it began.
    """

    before: float
    after: float
    began: int

    @property
    def rose(self) -> bool:
        return self.after > self.before


class Detector:
    """Watches one number and says when its level has changed.

    Args:
        least: the smallest change that matters, in the unit of the number.
        sensitivity: how many numbers must differ, and by how much.

    Examples:
        >>> from penstock.control.changes import Detector
        >>> detector = Detector(least=1.0)
        >>> changes = [detector.feed(ms) for ms in [2.0, 2.1] * 10 + [60.0, 60.2] * 6]
        >>> [round(each.after) for each in changes if each]
        [60]
    """

    WINDOW = 64

    def __init__(self, least: float, sensitivity: Sensitivity = USUAL) -> None:
        self.least = least
        self.sensitivity = sensitivity
        self._regime: deque[float] = deque(maxlen=self.WINDOW)
        self._pending: list[float] = []
        self._fall = self.sensitivity.fall
        self._since_fall: int | None = None

    @property
    def level(self) -> float | None:
        """The median since the last verified change; None before the first number."""
        return median(self._regime) if self._regime else None

    @property
    def pending(self) -> int:
        """How many numbers in a row speak for a change that is not verified yet."""
        return len(self._pending)

    def threshold(self) -> float:
        """How far from the level a number is suspect."""
        level = self.level or 0.0
        # A deviation told by a few numbers may be far too small.
        wide = DEVIATIONS * (1 + 4 / max(1, len(self._regime)))
        return max(wide * deviation(self._regime), self.sensitivity.share * level, self.least)

    def feed(self, value: float) -> Change | None:
        """Takes the next number; returns the change that it verifies, if it does."""
        if self._since_fall is not None:
            self._since_fall += 1
        level = self.level
        if level is None or len(self._regime) < self.sensitivity.calibration:
            self._regime.append(value)
            return None
        distance = value - level
        if abs(distance) <= self.threshold():
            self._end_alarm()
            self._regime.append(value)
            return None
        if self._pending and (self._pending[-1] > level) != (distance > 0):
            self._end_alarm()
        self._pending.append(value)
        needed = self._fall
        if distance > 0:
            doubles = min(self._pending) >= max(2 * level, level + 1.5 * self.threshold(), self._rare())
            needed = self.sensitivity.rise if doubles else self.sensitivity.small_rise
        if len(self._pending) < needed:
            return None
        return self._verify(level)

    def _rare(self) -> float:
        """The value that about one in thirty numbers since the last change exceeds. If the tails are heavy, more
        evidence is needed for values within them.
        """
        return sorted(self._regime)[-2] if len(self._regime) >= self.WINDOW // 2 else 0.0

    def restart(self) -> None:
        """Forgets the level, because something else is measured from now on."""
        self._regime.clear()
        self._pending = []

    def _verify(self, before: float) -> Change:
        change = Change(before, median(self._pending), len(self._pending))
        self._regime.clear()
        self._regime.extend(self._pending)
        self._pending = []
        if not change.rose:
            self._since_fall = 0
        elif self._since_fall is not None:
            soon = self._since_fall <= 4 * self._fall
            doubled = min(2 * self._fall, MOST_FALL)
            self._fall = doubled if soon else self.sensitivity.fall
            self._since_fall = None
        return change

    def _end_alarm(self) -> None:
        self._regime.extend(self._pending)
        self._pending = []


class Watch(Generic[Report, Verified]):
    """Follows one thing by what is reported of it in each iteration, and says when it has changed.

    Args:
        detector: of its level.

    Attributes:
        detector: as given.
        detectors: all that watch the reports, `detector` among them.
        reports: since the last verified change, latest last.
    """

    ITERATIONS = 16

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.detectors = [detector]
        self.reports: deque[Report] = deque(maxlen=self.ITERATIONS)

    def feed(self, report: Report) -> Verified | None:
        """Takes the report of an iteration; returns the change that it verifies, if it does."""
        found = self._suspect(report)
        self.reports.append(report)
        if found is None:
            return None
        change, num_parts = found
        # What was counted in parts began in the iteration of the first of them.
        began, rows = min(-(-change.began // num_parts), len(self.reports)), list(self.reports)
        self.reports = deque(rows[-began:], maxlen=self.ITERATIONS)
        return self._verified(change, began, rows[:-began] or rows, rows[-began:])

    @abstractmethod
    def _suspect(self, report: Report) -> tuple[Change, int] | None:
        """Feeds a report to the detector in parts. Returns the verified change, and in how many parts."""

    @abstractmethod
    def _verified(
        self, change: Change, num_iterations: int, before: Sequence[Report], after: Sequence[Report]
    ) -> Verified:
        """Describes a change by the reports before it and since."""
