"""Charts for reports, experiments and benchmarks: data in, SVG out. matplotlib draws them.

    pip install matplotlib

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
apart from its neighbours, and a marker or a stroke besides. Colours are CSS variables, so that a chart suits a light
and a dark background. Text stays text. With one version of matplotlib the same data gives the same SVG.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from xml.sax.saxutils import escape

from penstock.cost import CostError
from penstock.draw.style import LIGHT_INK, ink, num, short, text_width, wrapped
from penstock.formats.files import write_whole

__all__ = [
    "MOST_COLUMNS", "Axis", "Bars", "Chart", "Figure", "Hue", "Level", "Line", "Mark", "averaged", "bar_chart",
    "can_draw", "heat_map", "line_chart", "save_chart", "stacked_chart",
]  # fmt: skip

Hue = Literal["blue", "brick", "green", "amber", "purple", "grey", "navy"]
HUES = {
    "blue": ("#2f6db5", "#5b9be6"),
    "brick": ("#c4552d", "#e67a52"),
    "green": ("#2ba587", "#35bd9b"),
    "amber": ("#eb9a2d", "#f0a945"),
    "purple": ("#7c5fa8", "#a58bd3"),
    "grey": ("#7a828e", "#98a2b0"),
    "navy": ("#1d4468", "#a9c9ec"),
}
"""The colour of a series on a light and on a dark background, in the order of series: the hues of schedules."""
STEPS = (
    ("#eef1f5", "#f6e3bd", "#f3c878", "#eaa044", "#d97333", "#b54a28", "#86301f", "#561c18"),
    ("#1c242e", "#3d2a22", "#63371f", "#8f4a22", "#bd6429", "#e08a3c", "#f2b668", "#fbe3b4"),
)
"""A heat map's colours from none to most, on a light and on a dark ground. Lightness only falls, or only rises."""
COLORS = {
    "page": (LIGHT_INK, "#0f151d"),
    "text": ("#16202c", "#eef2f7"),
    "soft": ("#5f6a78", "#9aa6b4"),
    "grid": ("#e3e8ee", "#26303b"),
    **HUES,
    **{f"h{step}": pair for step, pair in enumerate(zip(*STEPS, strict=True))},
}
DARK_ON_BOTH = "#16202d"
"""Text on a bar whose colour is light on both backgrounds."""
STROKES = {"solid": "-", "dashed": (0, (4, 2.5)), "dotted": (0, (1, 2)), "none": ""}
MARKERS = "osD^v"

PAD, MOST_COLUMNS = 16.0, 400
WITH_MARKERS = 24
"""Most points of a line that each get a marker."""
SMALL, LEAST = 11.0, 9.5
"""Pixels of a value's text, and of the narrowest bar whose value is written, turned on its side if need be."""
ROW, CELL = 34.0, 20.0
"""Pixels of a row of parts, and of a row of a heat map."""

_SETTINGS: Any = {
    "font.size": 12, "svg.fonttype": "none", "text.parse_math": False, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.ymargin": 0.04,
    "axes.xmargin": 0.0, "ytick.major.size": 0, "lines.linewidth": 2, "lines.markersize": 5.5,
    "text.color": COLORS["text"][0], "axes.edgecolor": COLORS["soft"][0], "axes.labelcolor": COLORS["soft"][0],
    "grid.color": COLORS["grid"][0], "xtick.color": COLORS["soft"][0], "ytick.color": COLORS["soft"][0],
    "legend.frameon": False, "legend.handlelength": 1.7, "legend.columnspacing": 1.4, "legend.borderpad": 0,
    "legend.borderaxespad": 0,
}  # fmt: skip


def _variables(dark: bool) -> str:
    return ".pc{" + "".join(f"--pc-{name}:{pair[dark]};" for name, pair in COLORS.items()) + "}"


STYLE = f"""
{_variables(False)}
@media(prefers-color-scheme:dark){{{_variables(True)}}}
.pc *{{stroke-linejoin:round}}.pc-page{{fill:var(--pc-page);stroke:var(--pc-grid)}}
.pc text{{font-family:-apple-system,BlinkMacSystemFont,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif!important}}
"""
"""Style that every chart needs, once per page."""


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        label: what it counts, with its unit.
        low, high: its ends. An axis of values begins at 0, or at the smallest value if some are negative.
        ticks: values with a mark, by default round ones.
        show: a value as text.
        is_whole: whether only whole numbers, such as those of steps, have a mark.
    """

    label: str = ""
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] | None = None
    show: Callable[[float], str] = short
    is_whole: bool = False


@dataclass(frozen=True)
class Line:
    """A line through points with rising x.

    Attributes:
        name: in the legend; one named "" is not there.
        x, y: the points; a y of None breaks the line.
        hue: by default that of its position among the series.
        stroke: solid, dashed, dotted, or none for single points.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    hue: Hue | None = None
    stroke: Literal["solid", "dashed", "dotted", "none"] = "solid"

    def __post_init__(self) -> None:
        same_length(self.name, self.x, self.y)


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x` with a short text at its top, like a number."""

    x: float
    text: str
    hue: Hue = "purple"


@dataclass(frozen=True)
class Level:
    """A horizontal line at `y`, like a bound or a figure of a paper, with its text in the legend."""

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


@dataclass(frozen=True)
class Figure:
    """A drawn chart: `str(figure)` is a whole SVG file, with its own style.

    Attributes:
        body: SVG elements.
        width, height: pixels.
        label: what it shows, in words, for those who do not see it.
        comment: for a file's first line, such as the command that made it.
        plot: the left, right, top and bottom (pixels) of the area between the axes.
    """

    body: str
    width: float
    height: float
    label: str
    comment: str | None
    plot: tuple[float, float, float, float]

    def __str__(self) -> str:
        first = f"<!-- {self.comment.replace('--', '- -')} -->\n" if self.comment else ""
        spot = f'x="0.5" y="0.5" width="{num(self.width - 1)}" height="{num(self.height - 1)}" rx="8"'
        return first + self._svg(f'<style>{STYLE}</style>\n<rect class="pc-page" {spot}/>\n') + "\n"

    def inline(self) -> str:
        """The chart for a page whose style holds `STYLE`; it takes the page's width, but no more than its own."""
        return self._svg("", f' style="width:100%;max-width:{num(self.width)}px;height:auto"')

    def _svg(self, before: str, more: str = "") -> str:
        wide, high = num(self.width), num(self.height)
        label = escape(self.label, {'"': "&quot;", "\n": " "})
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pc" width="{wide}" height="{high}" '
            f'viewBox="0 0 {wide} {high}" role="img" aria-label="{label}"{more}>\n{before}{self.body}</svg>'
        )


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
        first, per_column: the x of a heat map's first column, and how far x goes from column to column.
        steps: seven rising values at which a heat map's eight colours change; by default 1, 2, 5, 10 and so on up to
            the largest value.
        label: what the chart shows, for those who do not see it; by default title, note and series.
        comment: into the file's first line.
    """

    title: str = ""
    note: str = ""
    x: Axis = Axis()
    y: Axis = Axis()
    marks: Sequence[Mark] = ()
    levels: Sequence[Level] = ()
    left: float | None = None
    right: float | None = None
    width: int = 760
    height: int = 360
    show: Callable[[float], str] = short
    paper: str = "paper"
    unit: str = ""
    first: float = 0
    per_column: float = 1
    steps: Sequence[float] | None = None
    label: str = ""
    comment: str | None = None

    def lines(self, parts: Sequence[Line]) -> Figure:
        """Lines and points over a level axis, named in a legend."""
        if not parts:
            raise CostError("a chart of nothing: give a line or points")
        known = [v for part in parts for v in part.y if v is not None and math.isfinite(v)]
        if not known and None in (self.y.low, self.y.high):
            raise CostError(f"axis {self.y.label!r}: no finite value to show; give one, or low and high")
        with _axes() as axes:
            for place, part in enumerate(parts):
                is_marked = part.stroke == "none" or sum(v is not None for v in part.y) <= WITH_MARKERS
                axes.plot(
                    part.x,
                    [math.nan if v is None or not math.isfinite(v) else v for v in part.y],
                    color=_color(part.hue, place),
                    linestyle=STROKES[part.stroke],
                    marker=MARKERS[place % len(MARKERS)] if is_marked else "",
                    alpha=0.6 if part.stroke == "none" else 1.0,
                    clip_on=self.y.high is not None,
                    label=part.name,
                )
            for level in self.levels:
                axes.axhline(level.y, color=COLORS["soft"][0], linestyle=(0, (4, 3)), lw=1, label=level.text)
            self._lay_values(axes, [*known, *(level.y for level in self.levels)])
            self._lay_across(axes, self.x.low, self.x.high)
            return self._drawn(axes, [part.name for part in parts])

    def bars(self, groups: Sequence[str], series: Sequence[Bars]) -> Figure:
        """Bars side by side in groups, each with its value."""
        _check("groups", groups, series)
        wide, room = 0.8 / len(series), (self.width - 2 * PAD - 40) / len(groups)
        shown = [self.show(value) for each in series for value in each.values if value is not None]
        longest = max((text_width(each, SMALL) for each in shown), default=0.0)
        is_lying, is_told = longest <= wide * room, wide * room >= LEAST
        papers = [[math.nan if v is None else v for v in each.paper] or [math.nan] * len(groups) for each in series]
        highest = [v for each in series for row in (each.values, each.paper) for v in row if v is not None]
        with _axes() as axes:
            for place, (each, paper) in enumerate(zip(series, papers, strict=True)):
                at = [group + (place - (len(series) - 1) / 2) * wide for group in range(len(groups))]
                heights = [math.nan if value is None else value for value in each.values]
                name, color = each.name if len(series) > 1 or each.paper else None, _color(each.hue, place)
                axes.bar(at, heights, 0.94 * wide, color=color, label=name)
                left, right = [x - wide / 2 for x in at], [x + wide / 2 for x in at]
                axes.hlines(paper, left, right, color=COLORS["text"][0], lw=2)
                for x, value, other in zip(at, each.values, paper, strict=True) if is_told else ():
                    # A value is written above the stroke that its bar is compared with, if that is just above it.
                    top = 0.0 if value is None else max(value, 0.0)
                    top = other if 0 <= other - top < 0.08 * max(highest) else top
                    axes.annotate(
                        "–" if value is None else self.show(value), (x, top), (0, 3), textcoords="offset points",
                        ha="center", va="bottom", fontsize=SMALL, rotation=0 if is_lying else 90,
                    )  # fmt: skip
            if any(each.paper for each in series):
                axes.plot([], [], color=COLORS["text"][0], label=self.paper)
            names = [wrapped(group, room - 6) for group in groups]
            every = math.ceil(max(text_width(line) for lines in names for line in lines) / room)
            axes.set_xticks(range(0, len(groups), every), ["\n".join(lines) for lines in names[::every]])
            axes.tick_params(axis="x", size=0)
            axes.set_xlim(-0.5, len(groups) - 0.5)
            above = (SMALL if is_lying else longest) + 8 if is_told else 0.0
            self._lay_values(axes, highest, 0.04 + above / (0.7 * self.height))
            what = f"{', '.join(each.name for each in series)} for {'; '.join(groups)}"
            return self._drawn(axes, [what], below=8 + 15.0 * max(map(len, names)))

    def stacked(self, rows: Sequence[str], series: Sequence[Bars]) -> Figure:
        """One bar per row, made of one part of each series, with its value if there is room."""
        _check("rows", rows, series)
        if below := [each.name for each in series if any(value is not None and value < 0 for value in each.values)]:
            raise CostError(f"part {below[0]!r} is below 0 in a row: parts add up")
        parts = [[value or 0.0 for value in each.values] for each in series]
        total = max(map(sum, zip(*parts, strict=True))) or 1.0
        names = [wrapped(row, 0.34 * self.width) for row in rows]
        per_pixel = total / (self.width - 3 * PAD - max(text_width(line) for lines in names for line in lines))
        with _axes() as axes:
            before = [0.0] * len(rows)
            for place, (each, values) in enumerate(zip(series, parts, strict=True)):
                color, name = _color(each.hue, place), each.name if len(series) > 1 else None
                bars = axes.barh(range(len(rows)), values, 0.65, before, color=color, label=name)
                said = [self.show(v) if text_width(self.show(v)) * per_pixel < v else "" for v in values]
                on = LIGHT_INK if ink(color) == LIGHT_INK else DARK_ON_BOTH
                axes.bar_label(bars, said, label_type="center", color=on)
                before = [a + b for a, b in zip(before, values, strict=True)]
            self._lay_rows(axes, ["\n".join(lines) for lines in names], -0.5, len(rows) - 0.5)
            self._lay_across(axes, 0, self.x.high or 1.02 * total)
            return self._drawn(axes, [", ".join(each.name for each in series)], ROW * len(rows))

    def heat(self, rows: Sequence[str], values: Sequence[Sequence[float | None]]) -> Figure:
        """One row of cells for each name, the value as one of eight colours; None stays empty."""
        lengths = {len(row) for row in values}
        if not rows or len(rows) != len(values) or len(lengths) != 1 or not lengths - {0}:
            raise CostError(
                f"a heat map of {len(rows)} names and rows of {sorted(lengths)} values: give as many each"
            )
        known = [v for row in values for v in row if v is not None]
        bounds = steps_for(known) if self.steps is None else tuple(self.steps)
        if len(bounds) != len(STEPS[0]) - 1:
            raise CostError(f"{len(bounds)} steps: give {len(STEPS[0]) - 1}, between {len(STEPS[0])} colours")
        cells: list[list[tuple[float, float]]] = [[] for _ in STEPS[0]]
        for number, row in enumerate(values):
            for column, value in enumerate(row):
                if value is not None:
                    cells[bisect_right(bounds, value)].append((self.first + column * self.per_column, number))
        with _axes() as axes:
            from matplotlib.patches import PathPatch
            from matplotlib.path import Path as Outline

            for step, found in enumerate(cells):
                corners = [
                    (x + dx * self.per_column, y + dy)
                    for x, y in found
                    for dx, dy in ((0, -0.45), (1, -0.45), (1, 0.45), (0, 0.45), (0, -0.45))
                ]
                if corners:
                    codes = [1, 2, 2, 2, 79] * len(found)  # to the first corner, three lines, and closed
                    axes.add_patch(PathPatch(Outline(corners, codes), color=COLORS[f"h{step}"][0], lw=0))
                low, high = (self.show(each) for each in (bounds[max(0, step - 1)], bounds[min(step, 6)]))
                name = f"< {high}" if step == 0 else f"≥ {low} {self.unit}" if step == 7 else f"{low} – {high}"
                axes.plot([], [], "s", ms=10, color=COLORS[f"h{step}"][0], label=name)
            self._lay_rows(axes, rows, -0.5, len(rows) - 0.5)
            self._lay_across(axes, self.first, self.first + lengths.pop() * self.per_column)
            return self._drawn(axes, rows, CELL * len(rows))

    def _lay_values(self, axes: Any, values: Sequence[float], above: float = 0.04) -> None:
        """Lays the upright axis over values, with a share of its height free above the highest."""
        low = min([0.0, *values]) if self.y.low is None else self.y.low
        highest = max(values, default=low)
        high = highest + above / (1 - above) * (highest - low) if self.y.high is None else self.y.high
        axes.set_ylim(low, high if high > low else low + (abs(low) or 1.0))
        axes.grid(axis="y")
        _mark(axes.yaxis, self.y, self.height // 55)

    def _lay_across(self, axes: Any, low: float | None, high: float | None) -> None:
        axes.set_xlim(low, high)
        _mark(axes.xaxis, self.x, self.width // 90)

    def _lay_rows(self, axes: Any, names: Sequence[str], first: float, last: float) -> None:
        axes.set_yticks(range(len(names)), names, color=COLORS["text"][0])
        axes.set_ylim(last, first)

    def _drawn(
        self, axes: Any, names: Sequence[str], plot_height: float | None = None, below: float = 22.0
    ) -> Figure:
        """The figure with its title, note and legend, and the area between the axes where pixels say it is.

        Args:
            names: of what is drawn, for the label.
            plot_height: pixels of the area between the axes; by default all that the figure's height leaves.
            below: pixels of the texts at the marks of the level axis.
        """
        figure, y = axes.figure, PAD - 4
        axes.set_xlabel(self.x.label)
        said: list[tuple[str, float, float, str]] = []
        for text, size, color in ((self.title, 15.0, "text"), (self.note, 12.0, "soft")):
            for line in wrapped(text, self.width - 2 * PAD, size) if text else ():
                y += size + 4
                said.append((line, y, size, color))
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, int((self.width - 2 * PAD) / (max(map(text_width, labels), default=0.0) + 46)))
        legend_top, y = y + 8, y + 8 + 18.0 * -(-len(labels) // columns)
        y_label_at = y + 14
        top = y + 10 + 16 * bool(self.y.label) + 20 * bool(self.marks)
        below += PAD + 18 * bool(self.x.label)
        height = self.height if plot_height is None else top + plot_height + below
        figure.set_size_inches(self.width / 72, height / 72)
        bottom = height - below
        left = PAD + axes.yaxis.get_tightbbox().width + 4 if self.left is None else self.left
        right = self.right or self.width - PAD
        axes.set_position((left / self.width, below / height, (right - left) / self.width, (bottom - top) / height))
        if self.y.label:
            said.append((self.y.label, y_label_at, 12.0, "soft"))
        for text, at, size, color in said:
            weight = "bold" if size > 12 else "normal"
            figure.text(PAD / self.width, 1 - at / height, text, size=size, weight=weight, color=COLORS[color][0])
        if labels:
            where = (PAD / self.width, 1 - legend_top / height)
            figure.legend(handles, labels, loc="upper left", bbox_to_anchor=where, ncols=columns)
        self._draw_marks(axes)
        label = self.label or ". ".join(part for part in (self.title, self.note, "; ".join(names)) if part)
        return Figure(_svg(figure, label), self.width, height, label, self.comment, (left, right, top, bottom))

    def _draw_marks(self, axes: Any) -> None:
        """Vertical lines with their texts in pills. A text that would overlap the one before is left out."""
        free = -math.inf
        for mark in sorted(self.marks, key=lambda each: each.x):
            color, half = COLORS[mark.hue][0], text_width(mark.text, SMALL) / 2 + 6
            axes.axvline(mark.x, color=color, lw=1)
            at = axes.transData.transform((mark.x, 0))[0]
            if at - half >= free:
                axes.annotate(
                    mark.text, (mark.x, 1), (0, 9), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                    ha="center", va="center", fontsize=SMALL, color=LIGHT_INK,
                    bbox={"boxstyle": "round,pad=0.25", "fc": color, "ec": color},
                )  # fmt: skip
                free = at + half + 2


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


@contextmanager
def _axes() -> Iterator[Any]:
    """The axes of a new figure, under our settings."""
    if not can_draw():
        raise CostError("matplotlib draws charts, and it is not installed: pip install matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text stays text, and a browser has more fonts
        yield Canvas(dpi=72, facecolor="none").add_subplot(facecolor="none")


def _mark(axis: Any, given: Axis, most: int) -> None:
    """Marks the values given, or at most so many round ones."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if given.ticks is not None:
        axis.set_ticks(list(given.ticks))
    else:
        fewest = 1 if given.is_whole else 2
        axis.set_major_locator(
            MaxNLocator(max(2, most), steps=[1, 2, 5, 10], integer=given.is_whole, min_n_ticks=fewest)
        )
    axis.set_major_formatter(FuncFormatter(lambda value, _: given.show(value)))


def _svg(figure: Any, label: str) -> str:
    """The elements of a drawn figure, a line each. Our colours become variables; unused ids and fonts go."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": f"{label} {figure.get_size_inches()}"}):
        figure.savefig(file, format="svg", dpi=72, transparent=True)
    body = re.findall(r'<g id="figure_1".*(?=</svg>)', file.getvalue(), re.DOTALL)[0]
    body = re.sub(r'(?<=<g) id="[^"]*"|; font-family: [^";]*|^ +', "", body, flags=re.MULTILINE)
    body = re.sub(r" ?\n(?=[^<])", " ", re.sub(r"(?<=<g>)\n|\n(?=</g>)", "", body))
    names = {pair[0]: name for name, pair in COLORS.items()}
    body = re.sub("|".join(names), lambda found: f"var(--pc-{names[found[0]]})", body)
    return body.replace("xlink:href", "href")


def _color(hue: Hue | None, place: int) -> str:
    """The colour of a series: of the hue given, or of its place among the series."""
    return HUES[hue or list(HUES)[place % len(HUES)]][0]


def _check(what: str, names: Sequence[str], series: Sequence[Bars]) -> None:
    if not names or not series:
        raise CostError(f"a chart of {len(names)} {what} and {len(series)} series: give at least one of each")
    for each in series:
        if len(each.values) != len(names):
            raise CostError(f"series {each.name!r} has {len(each.values)} values for {len(names)} {what}")


def line_chart(parts: Sequence[Line], **options: Any) -> Figure:
    """Draws lines and points over a level axis: `Chart.lines`, with the attributes of `Chart`.

    Raises:
        CostError: nothing to draw, columns of different lengths, or no matplotlib.
    """
    return Chart(**options).lines(parts)


def bar_chart(groups: Sequence[str], series: Sequence[Bars], **options: Any) -> Figure:
    """Draws bars side by side in groups, one of each series in every group, with the attributes of `Chart`.

    Raises:
        CostError: nothing to draw, a series without a value (or None) for each group, or no matplotlib.
    """
    return Chart(**options).bars(groups, series)


def stacked_chart(rows: Sequence[str], series: Sequence[Bars], **options: Any) -> Figure:
    """Draws horizontal bars, one per row, made of one part of each series, with the attributes of `Chart`.

    Raises:
        CostError: nothing to draw, a part below 0, a series without a value (or None) for each row, or no matplotlib.
    """
    return Chart(**options).stacked(rows, series)


def heat_map(rows: Sequence[str], values: Sequence[Sequence[float | None]], **options: Any) -> Figure:
    """Draws one row of cells for each name, with the attributes of `Chart`. A cell whose value is None stays empty.

    Args:
        values: one sequence per row, all of the same length.

    Raises:
        CostError: no rows, rows of different lengths, or no matplotlib.
    """
    return Chart(**options).heat(rows, values)


def save_chart(figure: Figure, path: str | Path) -> None:
    """Writes a chart as a file, whole or not at all. Raises ScheduleError if the disk refuses it."""
    write_whole(Path(path), str(figure))


def same_length(name: str, one: Sequence[object], other: Sequence[object]) -> None:
    """Raises CostError unless two columns of a series have the same length."""
    if len(one) != len(other):
        raise CostError(f"series {name!r} has {len(one)} and {len(other)} values; give as many of each")


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
