"""Horizontal bars, one per row, each made of the parts of a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from penstock.cost import CostError
from penstock.draw.charts.axis import Axis, laid, level_axis
from penstock.draw.charts.figure import Figure, num, text, text_width, wrapped
from penstock.draw.charts.frame import PAD, LegendEntry, head
from penstock.draw.charts.hues import hue_of
from penstock.draw.charts.parts import Bars
from penstock.draw.scale import short

ROW, BAR = 34.0, 22.0


def stacked_chart(
    rows: Sequence[str],
    series: Sequence[Bars],
    *,
    title: str = "",
    note: str = "",
    x: Axis | None = None,
    show: Callable[[float], str] = short,
    width: int = 760,
    label: str = "",
    comment: str | None = None,
) -> Figure:
    """Draws one bar per row, made of one part of each series, with its value if there is room.

    Args:
        rows: their names, from top to bottom.
        series: the parts from left to right; whiskers and papers are not drawn.
        x: the axis, from 0.
        show: a part's value as text.

    The others are as for `line_chart`.

    Raises:
        CostError: nothing to draw, a part below 0, or a series without a value (or None) for each row.
    """
    if not rows or not series:
        raise CostError(f"a chart of {len(rows)} rows and {len(series)} parts: give at least one of each")
    for each in series:
        if len(each.values) != len(rows):
            raise CostError(f"part {each.name!r} has {len(each.values)} values for {len(rows)} rows; give one each")
        if any(value is not None and value < 0 for value in each.values):
            raise CostError(f"part {each.name!r} is below 0 in a row: parts add up")
    hues = [hue_of(each.hue, place) for place, each in enumerate(series)]
    above, top = head(
        title, note, [LegendEntry(each.name, hue) for each, hue in zip(series, hues, strict=True)], width
    )
    top += 6
    names = [wrapped(row, 0.34 * width) for row in rows]
    left = PAD + 10 + max(text_width(line) for lines in names for line in lines)
    right = width - PAD - 8
    heights = [max(ROW, 15.0 * len(lines) + 8) for lines in names]
    bottom = top + sum(heights)
    totals = [sum(each.values[row] or 0.0 for each in series) for row in range(len(rows))]
    scale = laid(x or Axis(), [0.0, *totals], left, right, max(2, int((right - left) / 80)))
    out = list(above)
    y = top
    for row, lines in enumerate(names):
        middle = y + heights[row] / 2
        for place, line in enumerate(lines):
            out.append(text(left - 8, middle + 4 + 15 * (place - (len(lines) - 1) / 2), line, "text", "end"))
        so_far = 0.0
        for each, hue in zip(series, hues, strict=True):
            value = each.values[row] or 0.0
            x0, x1 = scale(so_far), scale(so_far + value)
            so_far += value
            if value <= 0:
                continue
            tip = escape(f"{rows[row]}, {each.name}: {show(value)}")
            spot = f'x="{num(x0)}" y="{num(middle - BAR / 2)}" width="{num(max(x1 - x0 - 1, 0.5))}"'
            out.append(f'<rect class="pc-f-{hue}" {spot} height="{num(BAR)}" rx="2"><title>{tip}</title></rect>')
            if text_width(show(value)) + 6 <= x1 - x0:
                out.append(text((x0 + x1) / 2, middle + 4, show(value), f"on-{hue}", "mid"))
        y += heights[row]
    out += level_axis(scale, bottom)
    said = label or ". ".join(part for part in (title, note, ", ".join(each.name for each in series)) if part)
    return Figure(tuple(out), width, bottom + (52 if x is not None and x.label else 34), said, comment)
