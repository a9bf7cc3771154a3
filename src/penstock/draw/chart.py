"""Charts for experiments, benchmarks and reports: data in, SVG out. No other package is needed.

    from penstock.draw.chart import Axis, Bars, Dots, Level, Line, bar_chart, dot_chart, line_chart, save_chart

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
    dot_chart(["7B", "14B"], [Dots("direct", [samples, samples]), Dots("delegate", [samples, samples])])
    stacked_chart(["direct", "delegate"], [Bars("busy", [0.6, 0.9]), Bars("idle", [0.4, 0.1])])
    heat_map(["0 → 1", "1 → 0"], [delays, delays], unit="ms")

Every series has a colour that colour-blind readers tell apart from its neighbours, and a shape or a stroke besides;
text stays text; light and dark ground are both served. The same data gives the same text, so a picture can be
compared with the one that is checked in.
"""

from __future__ import annotations

from pathlib import Path

from penstock.draw.charts.axis import Axis
from penstock.draw.charts.figure import STYLE, Figure
from penstock.draw.charts.groups import bar_chart, dot_chart
from penstock.draw.charts.heat import heat_map
from penstock.draw.charts.lines import line_chart
from penstock.draw.charts.parts import Band, Bars, Dots, Level, Line, Mark, Points
from penstock.draw.charts.stacked import stacked_chart
from penstock.formats.files import write_whole

__all__ = [
    "STYLE", "Axis", "Band", "Bars", "Dots", "Figure", "Level", "Line", "Mark", "Points", "bar_chart", "dot_chart",
    "heat_map", "line_chart", "save_chart", "stacked_chart",
]  # fmt: skip


def save_chart(figure: Figure, path: str | Path) -> None:
    """Writes a chart as a file, whole or not at all. Raises ScheduleError if the disk refuses it."""
    write_whole(Path(path), str(figure))
