"""What charts show, as values: axes, lines, points, bars, and the marks in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.cost import CostError
from penstock.draw.scale import short, tick_step

Hue = Literal["blue", "brick", "green", "amber", "purple", "grey", "navy"]


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        label: what it counts, with its unit.
        low, high: its ends. By default it begins at 0, or at the smallest value if some are negative, and ends at a
            round value above the largest.
        ticks: values with a mark, by default round ones.
        show: a value as text.
    """

    label: str = ""
    low: float | None = None
    high: float | None = None
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
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    """A line through points with rising x.

    Attributes:
        name: at the line's end, or in the legend.
        x, y: the points; a y of None breaks the line.
        hue: by default that of its position among the series.
        stroke: solid, dashed, dotted, or none for single points.
        titles: what is shown when the pointer is on a point; by default its values.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    hue: Hue | None = None
    stroke: Literal["solid", "dashed", "dotted", "none"] = "solid"
    titles: Sequence[str] = ()

    def __post_init__(self) -> None:
        same_length(self.name, self.x, self.y)


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x` with a short text at its top, like a number; `title` is shown when the pointer is on
    it.
    """

    x: float
    text: str
    title: str = ""
    hue: Hue = "purple"


@dataclass(frozen=True)
class Level:
    """A horizontal line at `y`, like a bound or a figure of a paper, with its text."""

    y: float
    text: str


@dataclass(frozen=True)
class Bars:
    """A series of bars, one in each group.

    Attributes:
        values: None for groups without a value.
        paper: another number to compare each bar with, drawn as a stroke across it; None for no number.
    """

    name: str
    values: Sequence[float | None]
    paper: Sequence[float | None] = ()
    hue: Hue | None = None

    def __post_init__(self) -> None:
        if self.paper:
            same_length(self.name, self.values, self.paper)


def same_length(name: str, one: Sequence[object], other: Sequence[object]) -> None:
    """Raises CostError unless two columns of a series have the same length."""
    if len(one) != len(other):
        raise CostError(f"series {name!r} has {len(one)} and {len(other)} values; give as many of each")


def runs(line: Line) -> list[list[tuple[float, float]]]:
    """The pieces of a line between its breaks."""
    found: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(line.x, line.y, strict=True):
        if b is None or not math.isfinite(b):
            found.append([])
        else:
            found[-1].append((a, b))
    return [run for run in found if run]


def laid(axis: Axis, values: Iterable[float], start: float, end: float, most: int, tight: bool = False) -> Scale:
    """Lays an axis over all values.

    Args:
        start, end: pixels of its ends.
        most: most marks.
        tight: ends at the first and last value, instead of at 0 and a round value above.

    Raises:
        CostError: nothing to show.
    """
    known = sorted(value for value in values if math.isfinite(value))
    if not known and (axis.low is None or axis.high is None):
        raise CostError(f"axis {axis.label!r}: no finite value to show; give one, or low and high")
    least = axis.low if axis.low is not None else known[0]
    largest = axis.high if axis.high is not None else known[-1]
    if axis.low is None and not tight:
        least = min(0.0, least)
    if largest <= least:
        largest = least + (abs(least) or 1.0)
    step = tick_step(largest - least, most)
    if not tight:
        least = axis.low if axis.low is not None else math.floor(least / step + 1e-9) * step
        largest = axis.high if axis.high is not None else math.ceil(largest / step - 1e-9) * step
    ticks = axis.ticks
    if ticks is None:
        first, last = math.ceil(least / step - 1e-9), math.floor(largest / step + 1e-9)
        ticks = [round(k * step, 12) for k in range(first, last + 1)]
    return Scale(axis, least, largest, start, end, tuple(ticks))
