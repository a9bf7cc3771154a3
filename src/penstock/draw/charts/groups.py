"""Charts by groups: bars side by side, and samples with their medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from statistics import median

from penstock.cost import CostError
from penstock.draw.charts.axis import Axis, Scale, laid, upright
from penstock.draw.charts.figure import Figure, num, spread_out, text, text_width, wrapped
from penstock.draw.charts.frame import PAD, LegendEntry, head, shape
from penstock.draw.charts.hues import hue_of
from penstock.draw.charts.parts import Bars, Dots, Level
from penstock.draw.scale import short

WIDEST = 64.0
"""Most pixels of a bar's width."""
LEAST = 9.0
"""Width in pixels of a bar that has room for its value turned on its side."""
SMALL = 11.0
"""Pixels of a value's text."""


def bar_chart(
    groups: Sequence[str],
    series: Sequence[Bars],
    *,
    title: str = "",
    note: str = "",
    y: Axis | None = None,
    levels: Sequence[Level] = (),
    paper: str = "paper",
    show: Callable[[float], str] = short,
    width: int = 760,
    height: int = 360,
    label: str = "",
    comment: str | None = None,
) -> Figure:
    """Draws bars side by side in groups, each with its value.

    Args:
        groups: their names, from left to right.
        series: one bar of each in every group, in this order.
        paper: the name in the legend for the strokes of `Bars.paper`.
        show: a bar's value as text.

    The others are as for `line_chart`.

    Raises:
        CostError: nothing to draw, or a series without a value (or None) for each group.
    """
    _check(groups, [(each.name, each.values) for each in series])
    values = [v for each in series for row in (each.values, each.high, each.paper) for v in row if v is not None]
    legend = [LegendEntry(each.name, hue_of(each.hue, place)) for place, each in enumerate(series)]
    if any(value is not None for each in series for value in each.paper):
        legend.append(LegendEntry(paper, "grey", "stroke"))
    plot = _Plot(groups, legend, values, title, note, y or Axis(), levels, width, height, SMALL + 4)
    gap = 3.0 if len(series) > 1 else 0.0
    bar = min(WIDEST, (plot.room * 0.8 - gap * (len(series) - 1)) / len(series))
    texts = [show(value) for each in series for value in each.values if value is not None]
    longest = max((text_width(each, SMALL) for each in texts), default=0.0)
    lying = longest + 3 <= bar + gap
    if not lying:
        plot = _Plot(groups, legend, values, title, note, y or Axis(), levels, width, height, longest + 8)
    out = list(plot.drawn)
    tooltips: list[str] = []
    base = plot.rise(max(0.0, plot.rise.low))
    for number, group in enumerate(groups):
        whole = len(series) * bar + (len(series) - 1) * gap
        for place, each in enumerate(series):
            value = each.values[number]
            left = plot.middle(number) - whole / 2 + place * (bar + gap)
            if value is None:
                tooltips.append(text(left + bar / 2, base - 5, "–", "soft", "mid"))
                continue
            at, tip = plot.rise(value), escape(f"{group}, {each.name}: {show(value)}")
            upper, lower = min(at, base), max(at, base)
            out.append(
                f'<rect class="pc-f-{hue_of(each.hue, place)}" x="{num(left)}" y="{num(upper)}" width="{num(bar)}" '
                f'height="{num(max(lower - upper, 0.8))}" rx="1.5"><title>{tip}</title></rect>'
            )
            highest = value
            if each.low and each.high and (low := each.low[number]) is not None:
                high = each.high[number]
                highest = max(value, high if high is not None else value)
                out.append(_whisker(left + bar / 2, plot.rise(low), plot.rise(highest), min(8.0, bar)))
            if each.paper and (other := each.paper[number]) is not None:
                said = escape(f"{group}, {each.name}, {paper}: {show(other)}")
                line = f'd="M{num(left - 2)} {num(plot.rise(other))}h{num(bar + 4)}"'
                out.append(f'<path class="pc-strong" {line}><title>{said}</title></path>')
                if 0 <= plot.rise(highest) - plot.rise(other) < 15:
                    highest = max(highest, other)
            if lying or bar >= LEAST:
                tooltips.append(_value(show(value), left + bar / 2, plot.rise(highest), lying))
    said = label or _said(title, note, groups, [each.name for each in series])
    return Figure((*out, *tooltips), width, height, said, comment)


def dot_chart(
    groups: Sequence[str],
    series: Sequence[Dots],
    *,
    title: str = "",
    y: Axis | None = None,
    show: Callable[[float], str] = short,
) -> Figure:
    """Draws samples as points by groups, with a stroke and the value at the median of each series in each group.

    The arguments are those of `bar_chart`.

    Raises:
        CostError: nothing to draw, or a series without samples (perhaps none) for each group.
    """
    _check(groups, [(each.name, each.samples) for each in series])
    values = [value for each in series for row in each.samples for value in row]
    legend = [LegendEntry(each.name, hue_of(each.hue, place), "shape", place) for place, each in enumerate(series)]
    plot = _Plot(groups, legend, values, title, "", y or Axis(), (), 760, 360)
    slot = min(96.0, plot.room * 0.86 / len(series))
    out, tooltips = list(plot.drawn), []
    for number, group in enumerate(groups):
        for place, each in enumerate(series):
            middle = plot.middle(number) + (place - (len(series) - 1) / 2) * slot
            samples, hue = each.samples[number], hue_of(each.hue, place)
            spread = min(12.0, slot / 5)
            for count, value in enumerate(samples):
                # Steps of the golden ratio lie evenly, and are the same in every drawing.
                aside = spread * (2 * ((count * 0.618034) % 1) - 1) if len(samples) > 1 else 0.0
                tip = escape(f"{group}, {each.name}: {show(value)}")
                out.append(shape(place, middle + aside, plot.rise(value), 3.2, f"pc-f-{hue} pc-dot", tip))
            if samples:
                half = median(samples)
                at = plot.rise(half)
                tooltips.append(
                    f'<path class="pc-strong" d="M{num(middle - spread - 5)} {num(at)}h{num(2 * spread + 10)}"/>'
                )
                if slot >= 2 * spread + 14 + text_width(show(half), 11):
                    tooltips.append(text(middle + spread + 8, at + 4, show(half), "text", "small", "over"))
    return Figure((*out, *tooltips), 760, 360, _said(title, "", groups, [each.name for each in series]))


class _Plot:
    """The area of a chart by groups: what surrounds the bars, and where the middle of each group is."""

    def __init__(
        self,
        groups: Sequence[str],
        legend: Sequence[LegendEntry],
        values: Sequence[float],
        title: str,
        note: str,
        y: Axis,
        levels: Sequence[Level],
        width: float,
        height: float,
        headroom: float = 0.0,
    ) -> None:
        above, top = head(title, note, legend if len(legend) > 1 else (), width)
        top += 30 if y.label else 20
        edge = max((text_width(level.text) for level in levels), default=-8.0) + 8
        right = width - PAD - min(0.3 * width, edge)
        # Texts below need the width of a group, which needs the width of the values: four digits are a fair guess.
        rough = (right - PAD - 40) / len(groups)
        names = [wrapped(group, rough - 6) for group in groups]
        bottom = height - PAD - 8 - 15 * max(map(len, names))
        share = 1 - headroom / (bottom - top)
        if y.high is None and y.scale == "linear" and values and max(values) > 0 and share > 0:
            # What is written above the highest bar must end below the plot's top, or a little above it.
            values = [*values, max(values) * (1 - 10 / (bottom - top)) / share]
        self.rise: Scale = laid(
            y, [*values, *(each.y for each in levels)], bottom, top, max(2, int((bottom - top) / 44))
        )
        left = PAD + 10 + max((text_width(y.show(tick)) for tick in self.rise.ticks), default=0.0)
        self.room = (right - left) / len(groups)
        self._left = left
        self.drawn = [*above, *upright(self.rise, left, right)]
        if y.label:
            self.drawn.append(text(PAD, top - 14, y.label, "soft"))
        places = spread_out([self.rise(each.y) for each in levels], 15, top, bottom)
        for level, place in zip(levels, places, strict=True):
            self.drawn.append(f'<path class="pc-level" d="M{num(left)} {num(self.rise(level.y))}H{num(right)}"/>')
            self.drawn.append(text(right + 7, place + 4, level.text, "soft"))
        self.drawn.append(f'<path class="pc-axis" d="M{num(left)} {num(bottom)}H{num(right)}"/>')
        for number, lines in enumerate(names):
            for row, line in enumerate(lines):
                self.drawn.append(text(self.middle(number), bottom + 17 + 15 * row, line, "text", "mid"))

    def middle(self, number: int) -> float:
        return self._left + self.room * (number + 0.5)


def _whisker(x: float, low: float, high: float, wide: float) -> str:
    half = wide / 2
    return (
        f'<path class="pc-whisker" d="M{num(x)} {num(low)}V{num(high)}M{num(x - half)} {num(low)}h{num(wide)}'
        f'M{num(x - half)} {num(high)}h{num(wide)}"/>'
    )


def _value(shown: str, x: float, y: float, lying: bool) -> str:
    """A bar's value above it, horizontal or turned on its side."""
    if lying:
        return text(x, y - 5, shown, "text", "mid", "small", "over")
    spot = f' transform="rotate(-90 {num(x + 4)} {num(y - 6)})"'
    return text(x + 4, y - 6, shown, "text", "small", "over", more=spot)


def _said(title: str, note: str, groups: Sequence[str], names: Sequence[str]) -> str:
    return ". ".join(each for each in (title, note, f"{', '.join(names)} for {'; '.join(groups)}") if each)


def _check(groups: Sequence[str], series: Sequence[tuple[str, Sequence[object]]]) -> None:
    if not groups or not series:
        raise CostError(f"a chart of {len(groups)} groups and {len(series)} series: give at least one of each")
    for name, values in series:
        if len(values) != len(groups):
            raise CostError(f"series {name!r} has {len(values)} values for {len(groups)} groups; give one each")
