"""Lines over a horizontal axis, with points, bands, marks and levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from statistics import fmean

from penstock.cost import CostError
from penstock.draw.charts.axis import Axis, Scale, laid, level_axis, upright
from penstock.draw.charts.figure import Figure, num, spread_out, text, text_width
from penstock.draw.charts.frame import PAD, PHONE, LegendEntry, head, shape
from penstock.draw.charts.hues import hue_of
from penstock.draw.charts.parts import Band, Level, Line, Mark, Points

Part = Line | Points | Band
WITH_MARKERS = 40
"""Most points of a line that each get a shape."""


def line_chart(
    parts: Sequence[Part],
    *,
    title: str = "",
    note: str = "",
    x: Axis | None = None,
    y: Axis | None = None,
    marks: Sequence[Mark] = (),
    levels: Sequence[Level] = (),
    left: float | None = None,
    right: float | None = None,
    width: int = 760,
    height: int = 360,
    label: str = "",
    comment: str | None = None,
) -> Figure:
    """Draws lines, points and bands over a level axis.

    Lines are named at their right end (one named "" is not). Points and bands, lines that end before the others, and
    all of a chart as narrow as a phone, are named in a legend.

    Args:
        parts: in the order in which they are drawn and take their hues.
        title, note: above; the note may be a sentence or two.
        x, y: the axes. x ends with the data unless told otherwise; y starts at 0.
        marks: upright lines; levels: level lines.
        left, right: pixels between which the lines lie, to stand above another chart.
        label: what the chart shows, for those who do not see it; by default title, note and series.
        comment: into the file's first line.

    Raises:
        CostError: nothing to draw, columns of different lengths, or a logarithm of 0.
    """
    if not parts:
        raise CostError("a chart of nothing: give a line, points or a band")
    x, y = x or Axis(), y or Axis()
    hues = [hue_of(part.hue, place) for place, part in enumerate(parts)]
    xs = [value for part in parts for value in part.x]
    near = max(xs, default=0.0) - 0.05 * (max(xs, default=0.0) - min(xs, default=0.0))
    direct = [place for place, part in enumerate(parts) if isinstance(part, Line) and _reaches(part, near)]
    beside: Sequence[Level] = levels
    if width < PHONE:
        direct, beside = [], []
    legend = [
        _entry(part, hues[place], place) for place, part in enumerate(parts) if place not in direct and part.name
    ]
    legend += [LegendEntry(level.text, "grey", "level") for level in levels if level not in beside]
    above, top = head(title, note, legend, width)
    labels = [parts[place].name for place in direct if parts[place].name] + [level.text for level in beside]
    if right is None:
        right = width - PAD - min(0.34 * width, 1.07 * max(map(text_width, labels), default=0.0) + 10)
    top += 12 + 16 * bool(y.label) + 18 * bool(marks)
    bottom = height - PAD - (42 if x.label else 24)
    rise = laid(y, _heights(parts, levels), bottom, top, max(2, int((bottom - top) / 44)))
    if left is None:
        left = PAD + 10 + max(text_width(rise.axis.show(tick)) for tick in rise.ticks)
    across = laid(x, [*xs, *(mark.x for mark in marks)], left, right, max(2, int((right - left) / 80)), x.low is None)
    out = [*above, *upright(rise, left, right), *level_axis(across, bottom)]
    if y.label:
        out.append(text(PAD, top - (30 if marks else 12), y.label, "soft"))
    out += [_level(level, rise, left, right) for level in levels]
    for place, part in enumerate(parts):
        out += _drawn(part, hues[place], place, across, rise)
    out += _marks(marks, across, top, bottom)
    out += _names(parts, direct, hues, beside, rise, right, top, bottom)
    said = label or ". ".join(each for each in (title, note, "; ".join(part.name for part in parts)) if each)
    return Figure(tuple(out), width, height, said, comment, (top, bottom))


def _reaches(line: Line, near: float) -> bool:
    """Whether the line ends at the right, where its name is written."""
    runs = _runs(line)
    return bool(runs) and runs[-1][-1][0] >= near


def _entry(part: Part, hue: str, place: int) -> LegendEntry:
    if isinstance(part, Line):
        return LegendEntry(part.name, hue, "line" if part.stroke == "solid" else part.stroke)
    return LegendEntry(part.name, hue, "shape" if isinstance(part, Points) else "box", place)


def _heights(parts: Sequence[Part], levels: Sequence[Level]) -> list[float]:
    values = [level.y for level in levels]
    for part in parts:
        rows = (part.low, part.high) if isinstance(part, Band) else (part.y,)
        values += [value for row in rows for value in row if value is not None]
    return values


def _drawn(part: Part, hue: str, place: int, across: Scale, rise: Scale) -> list[str]:
    if isinstance(part, Points):
        titles = part.titles or [
            f"{part.name}: {across.axis.show(a)}, {rise.axis.show(b)}" for a, b in zip(part.x, part.y, strict=True)
        ]
        style = f"pc-f-{hue} pc-dot"
        points = zip(part.x, part.y, titles, strict=True)
        return [shape(place, across(a), rise(b), 4, style, escape(tooltip)) for a, b, tooltip in points]
    if isinstance(part, Band):
        there = [f"{num(across(a))} {num(rise(b))}" for a, b in zip(part.x, part.high, strict=True)]
        back = [f"{num(across(a))} {num(rise(b))}" for a, b in zip(part.x, part.low, strict=True)]
        return [f'<path class="pc-band pc-f-{hue}" d="M{"L".join([*there, *reversed(back)])}z"/>']
    more = "" if part.stroke == "solid" else f" pc-{part.stroke}"
    runs = _runs(part)
    paths = "".join(_path(part, run, across, rise) for run in runs)
    out = [f'<path class="pc-line pc-l-{hue}{more}" d="{paths}"/>']
    if sum(map(len, runs)) <= WITH_MARKERS and part.form == "straight":
        for a, b in (point for run in runs for point in run):
            tooltip = escape(f"{part.name}: {rise.axis.show(b)} at {across.axis.show(a)}")
            out.append(shape(place, across(a), rise(b), 3.6, f"pc-f-{hue} pc-halo", tooltip))
    return out


def _runs(line: Line) -> list[list[tuple[float, float]]]:
    """The pieces of a line between its breaks."""
    runs: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(line.x, line.y, strict=True):
        if b is None or not math.isfinite(b):
            runs.append([])
        else:
            runs[-1].append((a, b))
    return [run for run in runs if run]


def _path(line: Line, run: Sequence[tuple[float, float]], across: Scale, rise: Scale) -> str:
    points = thinned([(across(a), rise(b)) for a, b in run])
    if line.form == "straight":
        dot = "h0" if len(points) == 1 else ""
        return "M" + "L".join(f"{num(a)} {num(b)}" for a, b in points) + dot
    drawn = f"M{num(points[0][0])} {num(points[0][1])}"
    for (_, before), (a, b) in pairwise(points):
        drawn += f"H{num(a)}" + (f"V{num(b)}" if b != before else "")
    return drawn


def averaged(x: Sequence[float], y: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """A line of at most `most` points: the means of neighbours, each at the last of them."""
    size = -(-len(x) // most) or 1
    starts = range(0, len(x), size)
    ends = [x[min(start + size, len(x)) - 1] for start in starts]
    return ends, [fmean(y[start : start + size]) for start in starts]


def thinned(points: Sequence[tuple[float, float]], apart: float = 0.5) -> list[tuple[float, float]]:
    """Thins out points (pixels). Of each column `apart` wide, at most four remain: its first, lowest,
    highest and last.
    """
    if len(points) < 3 or (points[-1][0] - points[0][0]) / len(points) >= apart / 2:
        return list(points)
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0] / apart), []).append(point)
    found = []
    for column in columns.values():
        kept = {0, len(column) - 1}
        kept.add(min(range(len(column)), key=lambda k: column[k][1]))
        kept.add(max(range(len(column)), key=lambda k: column[k][1]))
        found += [column[place] for place in sorted(kept)]
    return found


def _level(level: Level, rise: Scale, left: float, right: float) -> str:
    return f'<path class="pc-level" d="M{num(left)} {num(rise(level.y))}H{num(right)}"/>'


def _marks(marks: Sequence[Mark], across: Scale, top: float, bottom: float) -> list[str]:
    """Vertical lines with their texts in pills. A text that would overlap the one before is only in its title."""
    out, free = [], -math.inf
    for mark in sorted(marks, key=lambda each: each.x):
        at, half = across(mark.x), max(8.0, text_width(mark.text, 11) / 2 + 5)
        tooltip = f"<title>{escape(mark.title or mark.text)}</title>"
        out.append(f'<path class="pc-l-{mark.hue}" stroke-width="1.2" d="M{num(at)} {num(top - 4)}V{num(bottom)}"/>')
        if at - half >= free:
            pill = f'x="{num(at - half)}" y="{num(top - 21)}" width="{num(2 * half)}" height="17" rx="8.5"'
            shown = f'<text class="pc-pill" x="{num(at)}" y="{num(top - 8.5)}">{escape(mark.text)}</text>'
            out.append(f'<g>{tooltip}<rect class="pc-f-{mark.hue}" {pill}/>{shown}</g>')
            free = at + half + 2
        else:
            out.append(
                f'<circle class="pc-f-{mark.hue}" cx="{num(at)}" cy="{num(top - 5)}" r="2.5">{tooltip}</circle>'
            )
    return out


def _names(
    parts: Sequence[Part],
    direct: Sequence[int],
    hues: Sequence[str],
    levels: Sequence[Level],
    rise: Scale,
    right: float,
    top: float,
    bottom: float,
) -> list[str]:
    """Names to the right of the lines' ends, moved apart if they would overlap."""
    wanted, shown = [], []
    for place in direct:
        part = parts[place]
        assert isinstance(part, Line)
        if part.name:
            wanted.append(rise(_runs(part)[-1][-1][1]))
            shown.append((part.name, f"i-{hues[place]}"))
    for level in levels:
        wanted.append(rise(level.y))
        shown.append((level.text, "soft"))
    places = spread_out(wanted, 15, top + 2, bottom - 2)
    out = []
    for at, to, (name, style) in zip(wanted, places, shown, strict=True):
        if abs(at - to) > 5:
            out.append(f'<path class="pc-axis" d="M{num(right + 1)} {num(at)}L{num(right + 7)} {num(to)}"/>')
        out.append(text(right + 9, to + 4, name, style, "bold", "over"))
    return out
