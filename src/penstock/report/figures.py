"""The pictures of a report: metrics by step, memory, timelines; iteration times, links, where the time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from penstock.draw.charts.axis import Axis
from penstock.draw.charts.figure import Figure
from penstock.draw.charts.groups import bar_chart
from penstock.draw.charts.heat import MOST_COLUMNS, heat_map
from penstock.draw.charts.lines import averaged, line_chart
from penstock.draw.charts.parts import Bars, Level, Line, Mark
from penstock.draw.charts.stacked import stacked_chart
from penstock.draw.report_page import NARROW, sides, timelines
from penstock.draw.scale import short
from penstock.report.run_record import RunRecord
from penstock.report.run_story import RunMemory, RunStory, TitledTimeline
from penstock.report.words import way_name

MOST_POINTS = 200
"""Points of a line over steps."""
MOST_OPS = 8000
"""Ops of timelines that a page holds; more would make it slow."""


def ends(story: RunStory) -> tuple[float, float]:
    """The ends of the iterations' axis."""
    return story.iterations[0].number - 0.5, story.iterations[-1].number + 0.5


def curve(record: RunRecord, metrics: Mapping[str, str], y: Axis, width: int, levels: Sequence[Level] = ()) -> Figure:
    """Metrics over the steps of a run, each a line with a name. Neighbours of many steps are averaged."""
    lines = [
        Line(name, *averaged([step for step, _ in known], [value for _, value in known], MOST_POINTS))
        for metric, name in metrics.items()
        if (known := record.known(metric))
    ]
    return line_chart(
        lines,
        x=Axis(record.noun, low=record.steps[0] - 0.5, high=record.steps[-1] + 0.5),
        y=y,
        levels=levels,
        **sides(width),
        height=300,
        label=f"{y.label} over {record.noun}s: {', '.join(line.name for line in lines)}",
    )


def held_by(rows: Sequence[str], parts: Mapping[str, Sequence[float]], width: int) -> Figure:
    """Memory by process, in MiB, made of parts that are given in bytes."""
    return stacked_chart(
        rows,
        [Bars(name, [value / 2**20 for value in values]) for name, values in parts.items() if any(values)],
        x=Axis("MiB"),
        width=min(width, 760),
        label=f"Memory in MiB: {', '.join(parts)}",
    )


def iteration_times(story: RunStory, width: int) -> Figure:
    """Measured, simulated, had the first configuration been kept, and undisturbed, over iterations."""
    low, high = ends(story)
    numbers = [each.number for each in story.iterations]
    kept = [(each.number, each.kept) for each in story.iterations if each.decision and each.kept is not None]
    simulated = [(each.number, each.simulated) for each in story.iterations if each.simulated is not None]
    before = [each.baseline for each in story.iterations]
    parts = [Line("measured", numbers, [each.ms for each in story.iterations], hue="blue")]
    if kept:
        parts.insert(
            0, Line("first configuration, simulated", [n for n, _ in kept], [ms for _, ms in kept], hue="brick")
        )
    if any(ms is not None for ms in before):
        parts.append(Line("measured before the changes", numbers, before, "brick", "dashed"))
    if simulated:
        parts.append(Line("simulated", [n for n, _ in simulated], [ms for _, ms in simulated], "navy", "dotted"))
    values = [value for part in parts for value in part.y if value is not None]
    return line_chart(
        parts,
        x=Axis("iteration", low=low, high=high),
        y=Axis("ms an iteration", low=None if max(values) > 1.4 * story.undisturbed else 0.8 * min(values)),
        marks=marks(story),
        levels=[Level(story.undisturbed, f"undisturbed {short(story.undisturbed)}")],
        **sides(width),
        height=400 if width > NARROW else 330,
        label="Iteration time in milliseconds over iterations: measured, simulated, and with the first configuration",
    )


def marks(story: RunStory) -> list[Mark]:
    """Decisions at the first iteration that ran them; those that never ran where they were made, in grey."""
    found = []
    for each in story.decisions:
        at = each.first if each.first is not None else each.made + 1
        title = f"{each.number}: {each.action}, {each.plan}. {each.reason}"
        found.append(Mark(at - 0.5, str(each.number), title, "purple" if each.first is not None else "grey"))
    return found


def link_heat(story: RunStory, width: int) -> Figure:
    """The median transfer time of every direction by iteration."""
    low, high = ends(story)
    count = story.iterations[-1].number - story.iterations[0].number + 1
    per_column = max(1, math.ceil(count / MOST_COLUMNS))
    columns = math.ceil(count / per_column)
    rows = []
    for link in story.links:
        cells: list[list[float]] = [[] for _ in range(columns)]
        for each in story.iterations:
            if link in each.delays:
                cells[(each.number - story.iterations[0].number) // per_column].append(each.delays[link])
        rows.append([median(cell) if cell else None for cell in cells])
    each_is = f" Each column is the median of {per_column} iterations." if per_column > 1 else ""
    return heat_map(
        [way_name(link) for link in story.links],
        rows,
        note=f"Median time of a message, waiting for its receiver left out.{each_is}",
        first=low,
        per_column=per_column,
        unit="ms a message",
        x=Axis("iteration", low=low, high=high),
        marks=marks(story),
        **sides(width),
        label="Median transfer time of each direction of each link, by iteration",
    )


def memory(held: RunMemory, width: int) -> Figure:
    """The most each rank held, against its cap."""
    peaks, caps = held.peaks, held.caps
    return bar_chart(
        [f"rank {rank}" for rank in range(len(peaks))],
        [Bars("most held", peaks, paper=caps)],
        y=Axis(held.unit),
        paper="cap",
        width=width if len(peaks) > 8 else min(width, 760),
        height=280,
        label="Peak memory of each rank against its cap",
    )


def one_above_the_other(shown: Sequence[TitledTimeline]) -> str | None:
    """Timelines on one time axis; None where there are none, or too many ops."""
    if not shown or sum(len(each.timeline.ops) for each in shown) > MOST_OPS:
        return None
    return timelines([each.timeline for each in shown], [each.title for each in shown])
