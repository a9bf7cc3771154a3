"""Medians, and deviations from them, which a few wild values do not change."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

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
