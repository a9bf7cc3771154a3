"""What charts show, as values: lines, points, bands, bars, and the marks in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.cost import CostError

Hue = Literal["blue", "brick", "green", "amber", "purple", "grey", "navy"]


@dataclass(frozen=True)
class Line:
    """A line through points with rising x.

    Attributes:
        name: at the line's end, or in the legend.
        x, y: the points; a y of None breaks the line.
        hue: by default that of its position among the series.
        stroke: solid, dashed or dotted.
        form: straight from point to point, or in steps: each value holds until the next point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    hue: Hue | None = None
    stroke: Literal["solid", "dashed", "dotted"] = "solid"
    form: Literal["straight", "steps"] = "straight"

    def __post_init__(self) -> None:
        same_length(self.name, self.x, self.y)


@dataclass(frozen=True)
class Points:
    """Single points. If `titles` are given, each has a title that is shown when the pointer is on it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    hue: Hue | None = None
    titles: Sequence[str] = ()

    def __post_init__(self) -> None:
        same_length(self.name, self.x, self.y)


@dataclass(frozen=True)
class Band:
    """The shaded area between two lines: a range of measurements around a median."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    hue: Hue | None = None

    def __post_init__(self) -> None:
        same_length(self.name, self.x, self.low)
        same_length(self.name, self.x, self.high)


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
        low, high: ends of a whisker on each bar, if given.
        paper: another number to compare each bar with, drawn as a stroke across it; None for no number.
    """

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    paper: Sequence[float | None] = ()
    hue: Hue | None = None

    def __post_init__(self) -> None:
        for other in (self.low, self.high, self.paper):
            if other:
                same_length(self.name, self.values, other)


@dataclass(frozen=True)
class Dots:
    """A series of samples, several in each group, with a stroke at their median."""

    name: str
    samples: Sequence[Sequence[float]]
    hue: Hue | None = None


def same_length(name: str, one: Sequence[object], other: Sequence[object]) -> None:
    """Raises CostError unless two columns of a series have the same length."""
    if len(one) != len(other):
        raise CostError(f"series {name!r} has {len(one)} and {len(other)} values; give as many of each")
