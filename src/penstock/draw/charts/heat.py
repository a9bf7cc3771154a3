"""A heat map: rows by columns, the value as one of eight steps from pale to dark."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from penstock.cost import CostError
from penstock.draw.charts.axis import Axis, Scale, laid, level_axis
from penstock.draw.charts.figure import Figure, num, text, text_width
from penstock.draw.charts.frame import PAD, head
from penstock.draw.charts.hues import STEPS_LIGHT
from penstock.draw.charts.parts import Mark
from penstock.draw.scale import short

ROW, MOST_COLUMNS = 20.0, 400


def heat_map(
    rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    first: float = 0,
    per_column: int = 1,
    title: str = "",
    note: str = "",
    unit: str = "",
    x: Axis | None = None,
    marks: Sequence[Mark] = (),
    steps: Sequence[float] | None = None,
    show: Callable[[float], str] = short,
    left: float | None = None,
    right: float | None = None,
    width: int = 760,
    label: str = "",
    comment: str | None = None,
) -> Figure:
    """Draws one row of cells for each name. A cell whose value is None stays empty.

    Args:
        values: one sequence per row, all of the same length.
        first: the x of the first column; per_column: how far x goes from column to column.
        unit: of the values, in the legend.
        steps: seven rising values at which the eight colours change; by default 1, 2, 5, 10 and so on up to the
            largest value.
        left, right: pixels between which the cells are, to align them with another chart.

    The others are as for `line_chart`.

    Raises:
        CostError: no rows, or rows of different lengths.
    """
    lengths = {len(row) for row in values}
    if not rows or len(rows) != len(values) or len(lengths) != 1 or not lengths - {0}:
        raise CostError(f"a heat map of {len(rows)} names and rows of {sorted(lengths)} values: give as many each")
    count = lengths.pop()
    bounds = tuple(steps) if steps is not None else steps_for([v for row in values for v in row if v is not None])
    if len(bounds) != len(STEPS_LIGHT) - 1:
        raise CostError(f"{len(bounds)} steps: give {len(STEPS_LIGHT) - 1}, between {len(STEPS_LIGHT)} colours")
    above, top = head(title, note, (), width)
    top += 8
    left = left if left is not None else PAD + 10 + max(map(text_width, rows))
    right = right if right is not None else width - PAD
    bottom = top + ROW * len(rows)
    end = first + count * per_column
    across = laid(x or Axis(), [first, end], left, right, max(2, int((right - left) / 80)), tight=True)
    out = [*above]
    for number, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = top + ROW * number
        out.append(text(left - 8, y + ROW / 2 + 4, name, "text", "end"))
        out += _cells(row, bounds, across, first, per_column, y)
    for mark in marks:
        out.append(
            f'<path class="pc-l-{mark.hue}" stroke-width="1.2" d="M{num(across(mark.x))} {num(top)}V{num(bottom)}"/>'
        )
    out += level_axis(across, bottom + 2)
    below = bottom + (54 if x is not None and x.label else 28)
    key, end = _key(bounds, unit, show, left, width - PAD, below)
    out += key
    return Figure(tuple(out), width, end, label or f"{title}. {note}", comment, (top, bottom))


def steps_for(values: Sequence[float]) -> tuple[float, ...]:
    """Seven rising round values, 1, 2 and 5 times powers of ten, of which the last is below the largest value."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
    power = math.floor(math.log10(largest)) + 1
    round_values = [factor * 10.0**exponent for exponent in range(power - 5, power + 1) for factor in (1, 2, 5)]
    below = [round(value, 12) for value in round_values if value < largest * 0.999]
    return tuple(below[-(len(STEPS_LIGHT) - 1) :])


def _cells(
    row: Sequence[float | None], bounds: Sequence[float], across: Scale, first: float, per_column: float, y: float
) -> list[str]:
    """Adjacent cells of one step become one rectangle, and all of one step become one path."""
    paths: dict[int, str] = {}
    number = 0
    while number < len(row):
        value = row[number]
        begin = number
        step = None if value is None else bisect_right(bounds, value)
        while number < len(row):
            now = row[number]
            if (None if now is None else bisect_right(bounds, now)) != step:
                break
            number += 1
        if step is not None:
            x0, x1 = across(first + begin * per_column), across(first + number * per_column)
            cell = f"M{num(x0)} {num(y + 1)}H{num(x1)}v{num(ROW - 2)}H{num(x0)}z"
            paths[step] = paths.get(step, "") + cell
    return [f'<path class="pc-h{step}" d="{path}"/>' for step, path in sorted(paths.items())]


def _key(
    bounds: Sequence[float], unit: str, show: Callable[[float], str], left: float, right: float, y: float
) -> tuple[list[str], float]:
    """The steps side by side, with their unit and the values at which they change. Also returns the y below them."""
    out = []
    wide = min(46.0, (right - left) / (len(bounds) + 1))
    for number in range(len(bounds) + 1):
        place = f'x="{num(left + number * wide)}" y="{num(y)}" width="{num(wide - 2)}" height="11"'
        out.append(f'<rect class="pc-h{number}" {place} rx="2"/>')
    for number, bound in enumerate(bounds):
        out.append(text(left + (number + 1) * wide - 1, y + 25, show(bound), "soft", "mid", "small"))
    end = left + (len(bounds) + 1) * wide
    if unit and end + 8 + text_width(unit, 11) > right:
        return [*out, text(left, y + 41, unit, "soft", "small")], y + 50
    if unit:
        out.append(text(end + 8, y + 10, unit, "soft", "small"))
    return out, y + 34
