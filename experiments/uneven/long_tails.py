"""Draws lengths as production jobs have them: most are alike, and a few are much longer.

The quantiles are given as shares of the mean. Between them lengths rise as below, so bent that the mean is 1; above
the last they fall off as a power, cut at `longest`.

    share of the mean
    4 |                                    .
    2 |                                 ../        p95
    1 |........................_______--           p50
      +------------------------------------ share of the lengths
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PRODUCTION", "long_tailed"]

PRODUCTION = (0.81, 0.88, 1.92)
"""The 5th, 50th and 95th percentile of the microbatches of a production job, as shares of the mean."""
MOST = 2.0**52
LONGEST = 4.0
EXPONENT = 3.0
"""By which the longest twentieth falls off."""
_GRID = (np.arange(20_000) + 0.5) / 20_000


def long_tailed(
    num: int,
    mean: float,
    seed: int = 0,
    quantiles: tuple[float, float, float] = PRODUCTION,
    longest: float = LONGEST,
) -> NDArray[np.int64]:
    """Lengths in tokens, int64[num], at least 1 each, drawn one by one.

    Args:
        num: how many lengths.
        mean: tokens per length, on average.
        seed: decides what is drawn.
        quantiles: the 5th, 50th and 95th percentile, each divided by the mean.
        longest: the longest length, divided by the mean.

    Raises:
        ValueError: quantiles that do not rise, or that no lengths of that mean have.

    Examples:
        >>> lengths = long_tailed(1000, mean=500)
        >>> round(float(lengths.mean()), -2), int(lengths.max()) <= 2000
        (500.0, True)
    """
    low, middle, high = quantiles
    if num < 0 or seed < 0 or not mean >= 1 or not 0 < low <= middle <= high <= longest < np.inf:
        raise ValueError(
            f"{num} lengths of mean {mean:g} with quantiles {low:g}, {middle:g}, {high:g} and at most {longest:g} of "
            f"it, by seed {seed}; the mean must be at least 1, they must rise, and the seed be at least 0."
        )
    if mean * longest > MOST:
        raise ValueError(
            f"lengths of mean {mean:g} and at most {longest:g} of it; the longest may be {MOST:g} tokens."
        )
    bend = _bend(quantiles, longest)
    drawn = _quantile(np.random.default_rng(seed).random(num), quantiles, longest, bend)
    return np.maximum(1, np.round(mean * drawn)).astype(np.int64)


def _quantile(
    share: NDArray[np.float64], quantiles: tuple[float, float, float], longest: float, bend: float
) -> NDArray[np.float64]:
    low, middle, high = quantiles
    below = low + (middle - low) * (share - 0.05) / 0.45  # also below the first, as far as it goes
    rising = middle + (high - middle) * (np.clip((share - 0.5) / 0.45, 0, 1)) ** bend
    tail = high * (0.05 / np.maximum(1 - share, 1e-12)) ** (1 / EXPONENT)
    found: NDArray[np.float64] = np.where(share < 0.5, below, np.where(share < 0.95, rising, tail))
    return np.clip(found, 0.0, longest)


def _bend(quantiles: tuple[float, float, float], longest: float) -> float:
    """The exponent with which the mean is 1. Raises ValueError where there is none."""

    def mean(bend: float) -> float:
        return float(_quantile(_GRID, quantiles, longest, bend).mean())

    least, most = 0.05, 400.0
    if not mean(most) <= 1 <= mean(least):
        raise ValueError(
            f"no lengths with quantiles {', '.join(f'{each:g}' for each in quantiles)} of their mean: by these it "
            f"would be {mean(most):.2f} to {mean(least):.2f} of itself; give others, or another longest."
        )
    for _ in range(60):
        bend = (least * most) ** 0.5
        least, most = (bend, most) if mean(bend) > 1 else (least, bend)
    return least
