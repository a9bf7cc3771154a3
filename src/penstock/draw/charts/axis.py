"""Axes: from values to pixels, ticks at round values, and the frame around what is plotted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.cost import CostError
from penstock.draw.charts.figure import num, text
from penstock.draw.scale import short, tick_step


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        label: what it counts, with its unit.
        low, high: its ends. By default it begins at 0, or at the smallest value if some are negative or the scale is
            logarithmic, and ends at a round value above the largest.
        scale: linear or log.
        ticks: values with a mark, by default round ones.
        show: a value as text.
    """

    label: str = ""
    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log"] = "linear"
    ticks: Sequence[float] | None = None
    show: Callable[[float], str] = short


@dataclass(frozen=True)
class Scale:
    """An axis between two pixels."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        if self.axis.scale == "log":
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def holds(self, value: float) -> bool:
        """Whether the value lies on the axis."""
        slack = 1e-9 * abs(self.high - self.low)
        return self.low - slack <= value <= self.high + slack


def laid(axis: Axis, values: Iterable[float], start: float, end: float, most: int, tight: bool = False) -> Scale:
    """Lays an axis over all values.

    Args:
        start, end: pixels of its ends.
        most: most marks.
        tight: ends at the first and last value, instead of at 0 and a round value above.

    Raises:
        CostError: nothing to show, or a logarithm of a value that is not above 0.
    """
    known = sorted(value for value in values if math.isfinite(value))
    if not known and (axis.low is None or axis.high is None):
        raise CostError(f"axis {axis.label!r}: no finite value to show; give one, or low and high")
    least = axis.low if axis.low is not None else known[0]
    largest = axis.high if axis.high is not None else known[-1]
    if axis.scale == "log":
        return _log(axis, least, largest, start, end)
    if axis.low is None and not tight:
        least = min(0.0, least)
    if largest <= least:
        largest = least + (abs(least) or 1.0)
    step = tick_step(largest - least, most)
    if not tight:
        least = axis.low if axis.low is not None else math.floor(least / step + 1e-9) * step
        largest = axis.high if axis.high is not None else math.ceil(largest / step - 1e-9) * step
    if axis.ticks is not None:
        ticks = tuple(axis.ticks)
    else:
        first, last = math.ceil(least / step - 1e-9), math.floor(largest / step + 1e-9)
        ticks = tuple(round(k * step, 12) for k in range(first, last + 1))
    return Scale(axis, least, largest, start, end, ticks)


def _log(axis: Axis, least: float, largest: float, start: float, end: float) -> Scale:
    if least <= 0:
        raise CostError(f"axis {axis.label!r} is logarithmic and has to show {least:g}: only what is above 0 fits")
    if largest <= least:
        largest = 10 * least
    steps = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(largest)) + 1)
        for factor in (1, 2, 5)
    ]
    low = axis.low if axis.low is not None else max(step for step in steps if step <= least * (1 + 1e-9))
    above = [step for step in steps if step >= largest * (1 - 1e-9)]
    high = axis.high if axis.high is not None else min(above, default=largest)
    ticks = [step for step in steps if low * (1 - 1e-9) <= step <= high * (1 + 1e-9)]
    if len(ticks) > 8:
        ticks = [step for step in ticks if math.isclose(10 ** round(math.log10(step)), step)]
    return Scale(axis, low, high, start, end, tuple(axis.ticks if axis.ticks is not None else ticks))


def upright(scale: Scale, left: float, right: float) -> list[str]:
    """A vertical axis: faint lines from `left` to `right`, with values left of them and the label above."""
    lines = "".join(f"M{num(left)} {num(scale(tick))}H{num(right)}" for tick in scale.ticks)
    out = [f'<path class="pc-grid" d="{lines}"/>'] if lines else []
    out += [text(left - 8, scale(tick) + 4, scale.axis.show(tick), "soft", "end") for tick in scale.ticks]
    return out


def level_axis(scale: Scale, bottom: float) -> list[str]:
    """A horizontal axis below what is plotted: a line, ticks with their values, and the label in the middle."""
    marks = "".join(f"M{num(scale(tick))} {num(bottom)}v5" for tick in scale.ticks)
    out = [f'<path class="pc-axis" d="M{num(scale.start)} {num(bottom)}H{num(scale.end)}{marks}"/>']
    out += [text(scale(tick), bottom + 19, scale.axis.show(tick), "soft", "mid") for tick in scale.ticks]
    if scale.axis.label:
        out.append(text((scale.start + scale.end) / 2, bottom + 38, scale.axis.label, "soft", "mid"))
    return out
