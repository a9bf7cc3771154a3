"""Charts for reports, experiments and benchmarks: data in, SVG out. No other package is needed.

    from penstock.draw.chart import Axis, Bars, Level, Line, bar_chart, line_chart, save_chart

    figure = line_chart(
        [Line("frozen", delays, frozen), Line("dynamic", delays, dynamic, stroke="dashed")],
        title="Slowdown over the delay of the last link",
        x=Axis("delay, ms"),
        y=Axis("slowdown", low=1.0),
        levels=[Level(1.13, "paper 1.13")],
        comment="made by: python -m experiments....",
    )
    save_chart(figure, "slowdown.svg")          # or str(figure); figure.inline() for a page

    bar_chart(["A", "B"], [Bars("zb", [1.0, 1.0]), Bars("ours", [1.42, 1.43], paper=[1.36, None])])
    stacked_chart(["direct", "delegate"], [Bars("busy", [0.6, 0.9]), Bars("idle", [0.4, 0.1])])
    heat_map(["0 → 1", "1 → 0"], [delays, delays], unit="ms")

All are forms of one `Chart`, whose attributes they take. Every series has a colour that colour-blind readers tell
apart from its neighbours, and a shape or a stroke besides; text stays text; light and dark ground are both served.
The same data gives the same text, so a picture can be compared with the one that is checked in.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.cost import CostError
from penstock.draw.chart_parts import Axis, Bars, Level, Line, Mark, Scale, laid, runs
from penstock.draw.figure import HUES, STEPS, Figure, box, path, shape, text
from penstock.draw.scale import num, short, spread_out, text_width, wrapped
from penstock.formats.files import write_whole

__all__ = [
    "MOST_COLUMNS", "Axis", "Bars", "Chart", "Figure", "Level", "Line", "Mark", "averaged", "bar_chart",
    "heat_map", "line_chart", "save_chart", "stacked_chart",
]  # fmt: skip

PAD = 16.0
PHONE = 480
"""Charts narrower than this (pixels) name their series above, as there is no room beside them."""
WITH_MARKERS = 24
"""Most points of a line that each get a shape."""
WIDEST, LEAST = 64.0, 9.0
"""Most pixels of a bar's width, and those from which there is room for its value turned on its side."""
SMALL = 11.0
"""Pixels of a value's text."""
ROW, BAR, CELL = 34.0, 22.0, 20.0
"""Pixels of a row of parts, of its bar, and of a row of a heat map."""
MOST_COLUMNS = 400

Entry = tuple[str, str]
"""Of a legend: a name, and its swatch drawn around 0, 0."""


@dataclass(frozen=True)
class _Plot:
    """What is drawn already, and the area between the axes."""

    out: list[str]
    rise: Scale
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Chart:
    """What charts of every form have in common.

    Attributes:
        title, note: above; the note may be a sentence or two.
        x, y: the axes. The x of lines ends with the data unless told otherwise; y starts at 0.
        marks: upright lines; levels: level lines.
        left, right: pixels between which the chart is plotted, to stand above another one.
        width, height: pixels; rows make their own height.
        show: the value of a bar or of a heat map's step as text.
        paper: the name in the legend for the strokes of `Bars.paper`.
        unit: of a heat map's values.
        label: what the chart shows, for those who do not see it; by default title, note and series.
        comment: into the file's first line.
    """

    title: str = ""
    note: str = ""
    x: Axis | None = None
    y: Axis | None = None
    marks: Sequence[Mark] = ()
    levels: Sequence[Level] = ()
    left: float | None = None
    right: float | None = None
    width: int = 760
    height: int = 360
    show: Callable[[float], str] = short
    paper: str = "paper"
    unit: str = ""
    label: str = ""
    comment: str | None = None

    def lines(self, parts: Sequence[Line]) -> Figure:
        """Lines and points over a level axis.

        Lines are named at their right end (one named "" is not). Points, lines that end before the others, and all of
        a chart as narrow as a phone, are named in a legend.
        """
        if not parts:
            raise CostError("a chart of nothing: give a line or points")
        xs = [value for part in parts for value in part.x]
        near = max(xs, default=0.0) - 0.05 * (max(xs, default=0.0) - min(xs, default=0.0))
        hues = [hue_of(part.hue, place) for place, part in enumerate(parts)]
        names, legend = [], []
        for place, (part, hue) in enumerate(zip(parts, hues, strict=True)):
            drawn = runs(part)
            if self.width >= PHONE and part.stroke != "none" and drawn and drawn[-1][-1][0] >= near:
                names.append((drawn[-1][-1][1], part.name, f"i-{hue}"))
            elif part.name:
                stroke = path(f"line l-{hue} {part.stroke}", "M0 0h20")
                legend.append((part.name, shape(place, 10, 0, 4.5, f"f-{hue}") if part.stroke == "none" else stroke))
        values = [value for part in parts for value in part.y if value is not None]
        below = 42 if self.x is not None and self.x.label else 24
        plot = self._plot(legend, values, [each for each in names if each[1]], 12, below)
        across = self._across([*xs, *(mark.x for mark in self.marks)], plot.left, plot.right)
        plot.out[:] += self._level_axis(across, plot.bottom)
        for place, (part, hue) in enumerate(zip(parts, hues, strict=True)):
            plot.out[:] += _drawn(part, hue, place, across, plot.rise)
        plot.out[:] += _marked(self.marks, across, plot)
        return self._figure(plot.out, self.height, [part.name for part in parts], (plot.top, plot.bottom))

    def bars(self, groups: Sequence[str], series: Sequence[Bars]) -> Figure:
        """Bars side by side in groups, each with its value."""
        self._check("groups", groups, series)
        values = [v for each in series for row in (each.values, each.paper) for v in row if v is not None]
        legend = [_box_entry(each, place) for place, each in enumerate(series)]
        if any(value is not None for each in series for value in each.paper):
            legend.append((self.paper, path("strong", "M0 0h20")))
        legend = legend if len(legend) > 1 else []
        # Texts need the width of a group, which needs the width of the values: four digits are a fair guess.
        gap = 3.0 if len(series) > 1 else 0.0
        room = (self.width - 2 * PAD - 40) / len(groups)
        wide = min(WIDEST, (room * 0.8 - gap * (len(series) - 1)) / len(series))
        names = [wrapped(group, room - 6) for group in groups]
        shown = [self.show(value) for each in series for value in each.values if value is not None]
        longest = max((text_width(each, SMALL) for each in shown), default=0.0)
        lying = longest + 3 <= wide + gap
        below = 8 + 15 * max(map(len, names))
        plot = self._plot(legend, values, [], 16, below, SMALL + 4 if lying else longest + 8)
        room = (plot.right - plot.left) / len(groups)
        wide = min(wide, (room * 0.8 - gap * (len(series) - 1)) / len(series))
        plot.out.append(path("axis", f"M{num(plot.left)} {num(plot.bottom)}H{num(plot.right)}"))
        whole = len(series) * wide + (len(series) - 1) * gap
        every = math.ceil(max(text_width(line) for lines in names for line in lines) / room)
        texts: list[str] = []
        for number, group in enumerate(groups):
            middle = plot.left + room * (number + 0.5)
            for row, line in enumerate(names[number] if number % every == 0 else ()):
                plot.out.append(text(middle, plot.bottom + 17 + 15 * row, line, "text", "mid"))
            for place, each in enumerate(series):
                left = middle - whole / 2 + place * (wide + gap)
                self._bar(each, place, number, group, (left, wide, lying), plot, texts)
        return self._figure(
            [*plot.out, *texts],
            self.height,
            [f"{', '.join(each.name for each in series)} for {'; '.join(groups)}"],
            (plot.top, plot.bottom),
        )

    def _bar(
        self,
        bars: Bars,
        place: int,
        number: int,
        group: str,
        spot: tuple[float, float, bool],
        plot: _Plot,
        texts: list[str],
    ) -> None:
        """One bar with its value, and the stroke that it is compared with."""
        left, wide, lying = spot
        value, base = bars.values[number], plot.rise(max(0.0, plot.rise.low))
        if value is None:
            texts.append(text(left + wide / 2, base - 5, "–", "soft", "mid"))
            return
        at, tip, style = plot.rise(value), f"{group}, {bars.name}", f"f-{hue_of(bars.hue, place)}"
        upper, lower = min(at, base), max(at, base)
        plot.out.append(box(style, left, upper, wide, max(lower - upper, 0.8), f"{tip}: {self.show(value)}", 1.5))
        highest = value
        if bars.paper and (other := bars.paper[number]) is not None:
            stroke = f"M{num(left - 2)} {num(plot.rise(other))}h{num(wide + 4)}"
            plot.out.append(path("strong", stroke, f"{tip}, {self.paper}: {self.show(other)}"))
            highest = max(value, other) if 0 <= at - plot.rise(other) < 15 else value
        x, y, shown = left + wide / 2, plot.rise(highest), self.show(value)
        if lying:
            texts.append(text(x, y - 5, shown, "text", "mid", "small", "over"))
        elif wide >= LEAST:
            turned = f' transform="rotate(-90 {num(x + 4)} {num(y - 6)})"'
            texts.append(text(x + 4, y - 6, shown, "text", "small", "over", more=turned))

    def stacked(self, rows: Sequence[str], series: Sequence[Bars]) -> Figure:
        """One bar per row, made of one part of each series, with its value if there is room."""
        self._check("rows", rows, series)
        if below := [each.name for each in series if any(value is not None and value < 0 for value in each.values)]:
            raise CostError(f"part {below[0]!r} is below 0 in a row: parts add up")
        out, top = self._head([_box_entry(each, place) for place, each in enumerate(series)])
        top += 6
        names = [wrapped(row, 0.34 * self.width) for row in rows]
        left = PAD + 10 + max(text_width(line) for lines in names for line in lines)
        totals = [sum(each.values[row] or 0.0 for each in series) for row in range(len(rows))]
        right = self.width - PAD - 8
        scale = laid(self.x or Axis(), [0.0, *totals], left, right, max(2, int((right - left) / 80)))
        y = top
        for row, lines in enumerate(names):
            height = max(ROW, 15.0 * len(lines) + 8)
            middle = y + height / 2
            for place, line in enumerate(lines):
                out.append(text(left - 8, middle + 4 + 15 * (place - (len(lines) - 1) / 2), line, "text", "end"))
            so_far = 0.0
            for place, each in enumerate(series):
                value, hue = each.values[row] or 0.0, hue_of(each.hue, place)
                x0, x1 = scale(so_far), scale(so_far + value)
                so_far += value
                if value > 0:
                    tip = f"{rows[row]}, {each.name}: {self.show(value)}"
                    out.append(box(f"f-{hue}", x0, middle - BAR / 2, max(x1 - x0 - 1, 0.5), BAR, tip))
                    if text_width(self.show(value)) + 6 <= x1 - x0:
                        out.append(text((x0 + x1) / 2, middle + 4, self.show(value), f"on-{hue}", "mid"))
            y += height
        out += self._level_axis(scale, y)
        high = y + (52 if self.x is not None and self.x.label else 34)
        return self._figure(out, high, [", ".join(each.name for each in series)], (top, y))

    def heat(
        self,
        rows: Sequence[str],
        values: Sequence[Sequence[float | None]],
        first: float = 0,
        per_column: float = 1,
        steps: Sequence[float] | None = None,
    ) -> Figure:
        """One row of cells for each name, the value as one of eight colours; None stays empty."""
        lengths = {len(row) for row in values}
        if not rows or len(rows) != len(values) or len(lengths) != 1 or not lengths - {0}:
            raise CostError(
                f"a heat map of {len(rows)} names and rows of {sorted(lengths)} values: give as many each"
            )
        bounds = tuple(steps) if steps is not None else steps_for([v for row in values for v in row if v is not None])
        if len(bounds) != len(STEPS[0]) - 1:
            raise CostError(f"{len(bounds)} steps: give {len(STEPS[0]) - 1}, between {len(STEPS[0])} colours")
        out, top = self._head([])
        top += 8
        left = self.left if self.left is not None else PAD + 10 + max(map(text_width, rows))
        right = self.right if self.right is not None else self.width - PAD
        bottom = top + CELL * len(rows)
        across = self._across([first, first + lengths.pop() * per_column], left, right)
        for number, (name, row) in enumerate(zip(rows, values, strict=True)):
            y = top + CELL * number
            out.append(text(left - 8, y + CELL / 2 + 4, name, "text", "end"))
            begin, paths = first, dict[int, str]()
            for step, cells in groupby(None if value is None else bisect_right(bounds, value) for value in row):
                end = begin + len(list(cells)) * per_column
                if step is not None:
                    cell = f"M{num(across(begin))} {num(y + 1)}H{num(across(end))}v{num(CELL - 2)}"
                    paths[step] = f"{paths.get(step, '')}{cell}H{num(across(begin))}z"
                begin = end
            out += [path(f"h{step}", d) for step, d in sorted(paths.items())]
        for mark in self.marks:
            out.append(path(f"l-{mark.hue}", f"M{num(across(mark.x))} {num(top)}V{num(bottom)}"))
        out += self._level_axis(across, bottom + 2)
        below = bottom + (54 if self.x is not None and self.x.label else 28)
        key, end = self._steps(bounds, left, below)
        return self._figure([*out, *key], end, rows, (top, bottom))

    def _steps(self, bounds: Sequence[float], left: float, y: float) -> tuple[list[str], float]:
        """A heat map's colours side by side, with the values at which they change. Also returns the y below them."""
        right = self.width - PAD
        wide = min(46.0, (right - left) / (len(bounds) + 1))
        out = [box(f"h{number}", left + number * wide, y, wide - 2, 11) for number in range(len(bounds) + 1)]
        for number, bound in enumerate(bounds):
            out.append(text(left + (number + 1) * wide - 1, y + 25, self.show(bound), "soft", "mid", "small"))
        end = left + (len(bounds) + 1) * wide
        if self.unit and end + 8 + text_width(self.unit, SMALL) > right:
            return [*out, text(left, y + 41, self.unit, "soft", "small")], y + 50
        return [*out, text(end + 8, y + 10, self.unit, "soft", "small")] if self.unit else out, y + 34

    def _check(self, what: str, names: Sequence[str], series: Sequence[Bars]) -> None:
        if not names or not series:
            raise CostError(f"a chart of {len(names)} {what} and {len(series)} series: give at least one of each")
        for each in series:
            if len(each.values) != len(names):
                raise CostError(f"series {each.name!r} has {len(each.values)} values for {len(names)} {what}")

    def _head(self, legend: Sequence[Entry]) -> tuple[list[str], float]:
        """Title, note and legend. Also returns the y below them."""
        out: list[str] = []
        y = PAD if self.title or self.note or legend else 2.0
        for said, size, style in ((self.title, 15, "title"), (self.note, 12, "soft")):
            for line in wrapped(said, self.width - 2 * PAD, size) if said else ():
                y += size + (style == "soft")
                out.append(text(PAD, y, line, style))
                y += 4 - (style == "soft")
        y += 6 * bool(legend and out)
        x = PAD
        for name, swatch in legend:
            room = 26 + text_width(name) + 16
            if x > PAD and x + room - 16 > self.width - PAD:
                x, y = PAD, y + 18
            out += [
                f'<g transform="translate({num(x)} {num(y + 8)})">{swatch}</g>',
                text(x + 26, y + 12, name, "text"),
            ]
            x += room
        return out, y + 18 * bool(legend)

    def _plot(
        self,
        legend: list[Entry],
        values: Sequence[float],
        names: list[tuple[float, str, str]],
        above: float,
        below: float,
        headroom: float = 0.0,
    ) -> _Plot:
        """What is around lines and bars: the head, the upright axis, levels, and names right of the plot.

        Args:
            names: of lines, where they end: (y, name, style).
            above, below: pixels between the head and the plot, and below it.
            headroom: pixels for what is written above the highest bar.
        """
        y_axis, levels = self.y or Axis(), [(each.y, each.text, "soft") for each in self.levels]
        if self.width < PHONE:
            legend = legend + [(name, path("level", "M0 0h20")) for _, name, _ in levels]
        else:
            names = names + levels
        out, top = self._head(legend)
        top += above + 16 * bool(y_axis.label) + 18 * bool(self.marks)
        bottom = self.height - PAD - below
        right = self.right
        if right is None:
            widest = max((1.07 * text_width(name) for _, name, _ in names), default=0.0)
            right = self.width - PAD - min(0.34 * self.width, widest + 10)
        share = 1 - headroom / (bottom - top)
        if headroom and y_axis.high is None and values and max(values) > 0 and share > 0:
            # What is written above the highest bar must end below the plot's top, or a little above it.
            values = [*values, max(values) * (1 - 10 / (bottom - top)) / share]
        most = max(2, int((bottom - top) / 44))
        rise = laid(y_axis, [*values, *(each.y for each in self.levels)], bottom, top, most)
        left = self.left
        if left is None:
            left = PAD + 10 + max((text_width(y_axis.show(tick)) for tick in rise.ticks), default=0.0)
        grid = "".join(f"M{num(left)} {num(rise(tick))}H{num(right)}" for tick in rise.ticks)
        out += [path("grid", grid)] if grid else []
        out += [text(left - 8, rise(tick) + 4, y_axis.show(tick), "soft", "end") for tick in rise.ticks]
        if y_axis.label:
            out.append(text(PAD, top - 12 - 18 * bool(self.marks), y_axis.label, "soft"))
        out += [path("level", f"M{num(left)} {num(rise(y))}H{num(right)}") for y, _, _ in levels]
        wanted = [rise(y) for y, _, _ in names]
        places = spread_out(wanted, 15, top + 2, bottom - 2)
        for at, to, (_, name, style) in zip(wanted, places, names, strict=True):
            if abs(at - to) > 5:
                out.append(path("axis", f"M{num(right + 1)} {num(at)}L{num(right + 7)} {num(to)}"))
            out.append(text(right + 9, to + 4, name, style, "bold", "over"))
        return _Plot(out, rise, left, right, top, bottom)

    def _across(self, values: Sequence[float], left: float, right: float) -> Scale:
        x = self.x or Axis()
        return laid(x, values, left, right, max(2, int((right - left) / 80)), x.low is None)

    def _level_axis(self, scale: Scale, bottom: float) -> list[str]:
        """A horizontal axis below what is plotted: a line, ticks with their values, and the label in the middle."""
        marks = "".join(f"M{num(scale(tick))} {num(bottom)}v5" for tick in scale.ticks)
        out = [path("axis", f"M{num(scale.start)} {num(bottom)}H{num(scale.end)}{marks}")]
        out += [text(scale(tick), bottom + 19, scale.axis.show(tick), "soft", "mid") for tick in scale.ticks]
        if scale.axis.label:
            out.append(text((scale.start + scale.end) / 2, bottom + 38, scale.axis.label, "soft", "mid"))
        return out

    def _figure(self, out: list[str], height: float, names: Sequence[str], plot: tuple[float, float]) -> Figure:
        label = self.label or ". ".join(part for part in (self.title, self.note, "; ".join(names)) if part)
        return Figure(tuple(out), self.width, height, label, self.comment, plot)


def line_chart(parts: Sequence[Line], **options: Any) -> Figure:
    """Draws lines and points over a level axis: `Chart.lines`, with the attributes of `Chart`.

    Raises:
        CostError: nothing to draw, or columns of different lengths.
    """
    return Chart(**options).lines(parts)


def bar_chart(groups: Sequence[str], series: Sequence[Bars], **options: Any) -> Figure:
    """Draws bars side by side in groups, one of each series in every group, with the attributes of `Chart`.

    Raises:
        CostError: nothing to draw, or a series without a value (or None) for each group.
    """
    return Chart(**options).bars(groups, series)


def stacked_chart(rows: Sequence[str], series: Sequence[Bars], **options: Any) -> Figure:
    """Draws horizontal bars, one per row, made of one part of each series, with the attributes of `Chart`.

    Raises:
        CostError: nothing to draw, a part below 0, or a series without a value (or None) for each row.
    """
    return Chart(**options).stacked(rows, series)


def heat_map(
    rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    first: float = 0,
    per_column: float = 1,
    steps: Sequence[float] | None = None,
    **options: Any,
) -> Figure:
    """Draws one row of cells for each name, with the attributes of `Chart`. A cell whose value is None stays empty.

    Args:
        values: one sequence per row, all of the same length.
        first: the x of the first column; per_column: how far x goes from column to column.
        steps: seven rising values at which the eight colours change; by default 1, 2, 5, 10 and so on up to the
            largest value.

    Raises:
        CostError: no rows, or rows of different lengths.
    """
    return Chart(**options).heat(rows, values, first, per_column, steps)


def save_chart(figure: Figure, path: str | Path) -> None:
    """Writes a chart as a file, whole or not at all. Raises ScheduleError if the disk refuses it."""
    write_whole(Path(path), str(figure))


def hue_of(name: str | None, place: int) -> str:
    """The name of a series' hue: as given, or the one of its place among the series."""
    return name if name in HUES else list(HUES)[place % len(HUES)]


def steps_for(values: Sequence[float]) -> tuple[float, ...]:
    """Seven rising round values, 1, 2 and 5 times powers of ten, of which the last is below the largest value."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
    power = math.floor(math.log10(largest)) + 1
    round_values = [factor * 10.0**exponent for exponent in range(power - 5, power + 1) for factor in (1, 2, 5)]
    below = [round(value, 12) for value in round_values if value < largest * 0.999]
    return tuple(below[-(len(STEPS[0]) - 1) :])


def averaged(x: Sequence[float], y: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """A line of at most `most` points: the means of neighbours, each at the last of them."""
    size = -(-len(x) // most) or 1
    starts = range(0, len(x), size)
    return [x[min(start + size, len(x)) - 1] for start in starts], [
        fmean(y[start : start + size]) for start in starts
    ]


def thinned(points: Sequence[tuple[float, float]], apart: float = 0.5) -> list[tuple[float, float]]:
    """Thins out points (pixels). Of each column `apart` wide, at most four remain: its first, lowest,
    highest and last.
    """
    if len(points) < 3 or (points[-1][0] - points[0][0]) / len(points) >= apart / 2:
        return list(points)
    found = []
    for _, same in groupby(points, lambda point: int(point[0] / apart)):
        column = list(same)
        places = range(len(column))
        kept = {0, len(column) - 1, *(pick(places, key=lambda k: column[k][1]) for pick in (min, max))}
        found += [column[place] for place in sorted(kept)]
    return found


def _box_entry(bars: Bars, place: int) -> Entry:
    return bars.name, box(f"f-{hue_of(bars.hue, place)}", 3, -6, 14, 12)


def _drawn(line: Line, hue: str, place: int, across: Scale, rise: Scale) -> list[str]:
    """A line, and its points where they are few or all there is of it."""
    points = [point for run in runs(line) for point in run]
    out, style, size = [], f"f-{hue} dot", 4.0
    if line.stroke != "none":
        pieces = [thinned([(across(a), rise(b)) for a, b in run]) for run in runs(line)]
        d = ("M" + "L".join(f"{num(a)} {num(b)}" for a, b in each) + "h0" * (len(each) == 1) for each in pieces)
        out.append(path(f"line l-{hue} {line.stroke}", "".join(d)))
        style, size, points = f"f-{hue} halo", 3.6, points if len(points) <= WITH_MARKERS else []
    for number, (a, b) in enumerate(points):
        title = f"{line.name}: {rise.axis.show(b)} at {across.axis.show(a)}"
        out.append(shape(place, across(a), rise(b), size, style, line.titles[number] if line.titles else title))
    return out


def _marked(marks: Sequence[Mark], across: Scale, plot: _Plot) -> list[str]:
    """Vertical lines with their texts in pills. A text that would overlap the one before is only in its title."""
    out, free = [], -math.inf
    for mark in sorted(marks, key=lambda each: each.x):
        at, half = across(mark.x), max(8.0, text_width(mark.text, SMALL) / 2 + 5)
        title, style = mark.title or mark.text, f"f-{mark.hue}"
        out.append(path(f"l-{mark.hue}", f"M{num(at)} {num(plot.top - 4)}V{num(plot.bottom)}"))
        if at - half >= free:
            out.append(box(style, at - half, plot.top - 21, 2 * half, 17, title, 8.5))
            out.append(text(at, plot.top - 8.5, mark.text, "pill"))
            free = at + half + 2
        else:
            out.append(shape(0, at, plot.top - 5, 2.5, style, title))
    return out
