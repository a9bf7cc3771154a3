"""Numbers on pictures: ticks at round times, and times as short as their size allows."""

from __future__ import annotations

import math


def tick_step(length: float, most: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that cuts `length` into at most `most` parts."""
    if length <= 0 or most < 1:
        return 1.0
    raw = length / most
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10):
        if factor * power >= raw * (1 - 1e-9):
            return factor * power
    return 10 * power


def ticks(length: float, most: int) -> list[float]:
    """Round times from 0 to `length`."""
    step = tick_step(length, most)
    return [k * step for k in range(math.floor(length / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A time with three or four digits that matter: 2140, 33.5, 0.27."""
    size = abs(value)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """A share as a percentage with one decimal; exact zeros and hundreds stay short."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"
