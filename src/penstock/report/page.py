"""A run as one self-contained HTML page: it loads nothing, and says everything without its script too.

Every run has its record: loss, rate, speed and bubble by step, memory, one of the last steps, notices. A run whose
links were watched has the story of these links and of what was decided, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from statistics import median
from typing import Any

from penstock.draw.chart import (
    MOST_COLUMNS,
    Axis,
    Bars,
    Figure,
    Level,
    Line,
    Mark,
    averaged,
    bar_chart,
    heat_map,
    line_chart,
    stacked_chart,
)  # fmt: skip
from penstock.draw.report_page import (
    NARROW,
    PageNumber,
    inline,
    inline_section,
    maybe,
    section,
    sides,
    table,
    timelines,
    whole_page,
)
from penstock.draw.style import percent, short
from penstock.report.run_story import DecisionOutcome, RunMemory, RunRecord, RunStory
from penstock.report.words import range_of, seconds, sentence, sentences, times, way_name
from penstock.simulation import Timeline

_MEASURED = (
    "Measured: the median iteration since what the change answers began, and with it. Saved: measured iterations "
    "with the change against that median, while the same links are late."
)
MOST_SPELLS = 12
"""Times in which a link was late that the table of links lists."""
MOST_POINTS = 200
"""Points of a line over steps."""
MOST_OPS = 8000
"""Ops of timelines that a page holds; more would make it slow."""


def to_page(story: RunStory | None, record: RunRecord | None = None) -> str:
    """The report as one HTML page that loads nothing.

    Args:
        story: of the run's links; None if they were not watched.
        record: of the run's steps; None if it has none, as a rehearsal. One of the two is needed.

    Raises:
        ValueError: neither is given.
    """
    if (told := story or record) is None:
        raise ValueError("a page of nothing: give the story of a run, or its record")
    first, *others = sentences(story, record)
    script = "" if story is None else files("penstock.report").joinpath("report.js").read_text(encoding="utf-8")
    numbers: list[PageNumber] = []
    sections: list[str] = []
    if record is not None:
        numbers += _of_steps(record)
        sections += [*_curves(record), *_memory_of(record), _one_step(record)]
    if story is not None:
        numbers += _numbers(story)
        sections += _sections(story)
    if record is not None:
        sections += _end(record)
    return whole_page(
        title=f"{told.name}: run report",
        name=told.name,
        headline=first,
        more=others,
        numbers=numbers,
        facts=told.facts,
        sections=sections,
        data=to_json(story, record),
        script=script,
    )


def to_json(story: RunStory | None, record: RunRecord | None = None) -> dict[str, Any]:
    """What the page says, without its timelines, as a JSON object."""
    value: dict[str, Any] = {} if story is None else story.to_json()
    return {"name": record.name, "facts": dict(record.facts), **value, "run": record.to_json()} if record else value


CURVES: tuple[tuple[str, str, dict[str, str], Callable[[float], str]], ...] = (
    ("Loss", "loss", {"loss": "training", "validation_loss": "validation"}, short),
    ("Learning rate", "learning rate", {"lr": "learning rate"}, lambda rate: f"{rate:.3g}"),
    ("Speed", "a second, by all processes", {"tokens_per_second": "tokens", "samples_per_second": "samples"}, short),
    ("Bubbles", "share of all ranks' time without an op", {"bubble": "measured"}, percent),
)
"""Sections with metrics over steps: title, label of the axis, the name of each metric's line, a value as text."""


LARGE = {
    "loss": "training loss in the last step",
    "validation_loss": "validation loss",
    "tokens_per_second": "tokens a second in the last step",
    "samples_per_second": "samples a second in the last step",
}
"""The metrics that stand large at the top of the page, and what their numbers are of."""


def _of_steps(record: RunRecord) -> list[PageNumber]:
    """The few numbers of a run's steps that matter, large."""
    last = {what: record.known(m)[-1][1] for m, what in LARGE.items() if record.known(m)}
    # Four digits that matter, and the number written out: 15,930.
    found = [PageNumber(f"{float(f'{value:.4g}'):,.12g}", what) for what, value in last.items()]
    if found and record.columns.get("loss", (0,))[-1] is None:
        found[0] = PageNumber("not finite", LARGE["loss"])
    measured, simulated = record.bubbles
    if measured is not None and simulated is not None:
        found.append(
            PageNumber(percent(measured), f"bubbles in one of the last steps; simulated {percent(simulated)}")
        )
    return found


def _curves(record: RunRecord) -> list[str]:
    """Metrics over the steps of a run, each a line with a name. Neighbours of many steps are averaged."""
    found = []
    many = -(-len(record.steps) // MOST_POINTS)
    note = f"Each point is the mean of {many} {record.noun}s." if many > 1 else ""
    x = Axis(record.noun, low=record.steps[0] - 0.5, high=record.steps[-1] + 0.5, is_whole=True)
    for title, label, metrics, show in CURVES:
        known = {name: steps for metric, name in metrics.items() if (steps := record.known(metric))}
        if not known:
            continue
        lines = [
            Line(name, *averaged([step for step, _ in steps], [value for _, value in steps], MOST_POINTS))
            for name, steps in known.items()
        ]
        lowest = min(value for steps in known.values() for _, value in steps)
        y = Axis(label, low=0.95 * lowest if title == "Loss" and lowest > 0 else None, show=show)
        simulated = record.bubbles[1] if title == "Bubbles" else None
        levels = [] if simulated is None else [Level(simulated, f"simulated {percent(simulated)}")]
        said = f"{label} over {record.noun}s: {', '.join(known)}"
        found.append(inline_section(title, _over_steps(lines, x, y, levels, said), note))
    return found


def _over_steps(
    lines: Sequence[Line], x: Axis, y: Axis, levels: Sequence[Level], label: str
) -> Callable[[int], Figure]:
    return lambda width: line_chart(lines, x=x, y=y, levels=levels, **sides(width), height=300, label=label)


def _memory_of(record: RunRecord) -> list[str]:
    """Memory by process, in MiB: the most at any time, and the parts that weights take."""
    peaks, state = record.ended.get("peak_memory"), record.ended.get("state")
    found = ""
    if peaks:
        one = "rank" if len(peaks) == record.ended.get("num_ranks") else "process"
        found += _held_by(one, {"at most": peaks})
    if state:
        found += _held_by("rank", {name: [row[name] for row in state] for name in state[0]})
    note = "Above: the most that each process held at any time. Below: what of it is for weights."
    return [section("Memory of processes", found, note if peaks and state else "")] if found else []


def _held_by(one: str, parts: Mapping[str, Sequence[float]]) -> str:
    bars = [Bars(name, [value / 2**20 for value in values]) for name, values in parts.items() if any(values)]
    rows = [f"{one} {number}" for number in range(len(next(iter(parts.values()))))]
    label = f"Memory in MiB: {', '.join(parts)}"
    return inline(lambda width: stacked_chart(rows, bars, x=Axis("MiB"), width=min(width, 760), label=label))


def _one_step(record: RunRecord) -> str:
    noun = "pass" if record.ended.get("updating") else record.noun
    why = "It has too many ops to be drawn here; timeline.html has them." if record.ended else "Written when it ends."
    note = "One of the last, measured; and simulated with the op times that were measured." if record.shown else ""
    return section(f"One {noun}", _one_above_the_other(record.shown) or f"<p>{why}</p>", note)


def _one_above_the_other(shown: Sequence[tuple[str, Timeline]]) -> str:
    """Timelines on one time axis; nothing where there are none, or too many ops."""
    if not shown or sum(len(timeline.ops) for _, timeline in shown) > MOST_OPS:
        return ""
    return timelines([timeline for _, timeline in shown], [title for title, _ in shown])


def _end(record: RunRecord) -> list[str]:
    """Notices, and what the model wrote."""
    found = []
    if notices := record.ended.get("notices"):
        found.append(section("Notices", "".join(f"<p>{escape(sentence(str(each)))}</p>" for each in notices)))
    if record.text:
        found.append(section("What the model wrote", f'<p class="r-text">{escape(record.text)}</p>'))
    return found


def _numbers(story: RunStory) -> list[PageNumber]:
    """The few numbers that matter, large."""
    late = f"{len(story.late)} of {len(story.iterations)}"
    found = [PageNumber(late, "iterations with a late link")]
    found.append(PageNumber(seconds(story.lost), "lost, had nothing been changed", "lost"))
    if story.saved_about is None:
        found.append(PageNumber("not known", "of it saved: too few iterations"))
    elif story.saved is None:
        kind = "more by changes" if story.saved_about[0] < 0 else "of it saved"
        found.append(PageNumber(range_of(*story.saved_about), f"{kind}, as far as iterations that vary tell"))
    elif story.saved < 0:
        found.append(PageNumber(seconds(-story.saved), "more by changes that were slower, measured", "lost"))
    else:
        saved = seconds(story.saved) if story.saved > 0 else "none"
        found.append(PageNumber(saved, "of it saved, measured", "saved"))
    if story.error is not None:
        found.append(PageNumber(percent(story.error), "median error of the simulation"))
    return found


def _sections(story: RunStory) -> list[str]:
    found = [
        section(
            "Iteration time",
            _hover(_iteration_times, story),
            f"Iterations count from {story.iterations[0].number}. Undisturbed: {story.undisturbed_from}. First "
            "configuration kept: measured where it ran, else simulated under links and op times as measured in each "
            "iteration. Purple: a decision, where it began to run.",
        )
    ]
    if story.links:
        found.append(section("Links", _hover(_link_heat, story) + _spells(story)))
    said = _decisions(story.decisions) + "".join(f"<p>{escape(each)}.</p>" for each in story.unanswered)
    found.append(section("Decisions", said, _MEASURED))
    if story.faults or story.counters:
        found.append(section("Faults", _faults(story)))
    if drawn := _one_above_the_other(story.shown):
        is_measured = all(timeline.source == "measured" for _, timeline in story.shown)
        source = "Measured." if is_measured else "Simulated under links and op times as measured in these iterations."
        found.append(section("Before and after", drawn, source))
    if (memory := story.memory) is not None:
        note = f"Most held by each rank at any time, {memory.source}."
        found.append(inline_section("Memory", partial(_memory, memory), note))
    return found


def _ends(story: RunStory) -> tuple[float, float]:
    """The ends of the iterations' axis."""
    return story.iterations[0].number - 0.5, story.iterations[-1].number + 0.5


def _hover(draw: Callable[[RunStory, int], Figure], story: RunStory) -> str:
    """A figure over iterations, with what the script needs to know of its axis."""
    low, high = _ends(story)

    def place(figure: Figure) -> str:
        left, right, top, bottom = figure.plot
        numbers = {"left": left, "right": right, "low": low, "high": high, "top": top, "bottom": bottom}
        said = escape(f"{figure.label}. The arrow keys go from iteration to iteration.")
        at = " ".join(f'data-{name}="{value:.10g}"' for name, value in numbers.items())
        return f' data-hover tabindex="0" role="group" aria-label="{said}" {at}'

    return inline(partial(draw, story), place)


def _iteration_times(story: RunStory, width: int) -> Figure:
    """Measured, simulated, had the first configuration been kept, and undisturbed, over iterations."""
    low, high = _ends(story)
    numbers = [each.number for each in story.iterations]
    kept = {each.number: each.kept for each in story.iterations if each.decision and each.kept is not None}
    simulated = {each.number: each.simulated for each in story.iterations if each.simulated is not None}
    before = [each.baseline for each in story.iterations]
    parts = [Line("measured", numbers, [each.ms for each in story.iterations], hue="blue")]
    if kept:
        parts.insert(0, Line("first configuration, simulated", [*kept], [*kept.values()], hue="brick"))
    if any(ms is not None for ms in before):
        parts.append(Line("measured before the changes", numbers, before, "brick", "dashed"))
    if simulated:
        parts.append(Line("simulated", [*simulated], [*simulated.values()], "navy", "dotted"))
    values = [value for part in parts for value in part.y if value is not None]
    return line_chart(
        parts,
        x=Axis("iteration", low=low, high=high, is_whole=True),
        y=Axis("ms an iteration", low=None if max(values) > 1.4 * story.undisturbed else 0.8 * min(values)),
        marks=_marks(story),
        levels=[Level(story.undisturbed, f"undisturbed {short(story.undisturbed)}")],
        **sides(width),
        height=400 if width > NARROW else 330,
        label="Iteration time in milliseconds over iterations: measured, simulated, and with the first configuration",
    )


def _marks(story: RunStory) -> list[Mark]:
    """Decisions at the first iteration that ran them; those that never ran where they were made, in grey."""
    found = []
    for each in story.decisions:
        at = each.first if each.first is not None else each.made + 1
        found.append(Mark(at - 0.5, str(each.number), "purple" if each.first is not None else "grey"))
    return found


def _link_heat(story: RunStory, width: int) -> Figure:
    """The median transfer time of every direction by iteration."""
    low, high = _ends(story)
    per_column = max(1, math.ceil((high - low) / MOST_COLUMNS))
    rows = []
    for link in story.links:
        cells: list[list[float]] = [[] for _ in range(math.ceil((high - low) / per_column))]
        for each in story.iterations:
            if link in each.delays:
                cells[(each.number - story.iterations[0].number) // per_column].append(each.delays[link])
        rows.append([median(cell) if cell else None for cell in cells])
    each_is = f" Each column is the median of {per_column} iterations." if per_column > 1 else ""
    each_is += " White: not reported, as nothing changed." if any(None in row for row in rows) else ""
    return heat_map(
        [way_name(link) for link in story.links],
        rows,
        note=f"Median time of a message, waiting for its receiver left out.{each_is}",
        first=low,
        per_column=per_column,
        unit="ms a message",
        x=Axis("iteration", low=low, high=high, is_whole=True),
        marks=_marks(story),
        **sides(width),
        label="Median transfer time of each direction of each link, by iteration",
    )


def _memory(held: RunMemory, width: int) -> Figure:
    """The most each rank held, against its cap."""
    return bar_chart(
        [f"rank {rank}" for rank in range(len(held.peaks))],
        [Bars("most held", held.peaks, paper=held.caps)],
        y=Axis(held.unit),
        paper="cap",
        width=width if len(held.peaks) > 8 else min(width, 760),
        height=280,
        label="Peak memory of each rank against its cap",
    )


def _spells(story: RunStory) -> str:
    if not story.spells:
        return f"<p>No link was late by {short(story.smallest_delay)} ms or more.</p>"
    found = table(
        story.spells[:MOST_SPELLS],
        {
            "late link": lambda each: each.name,
            "iterations": lambda each: f"{each.first} to {each.last}",
            "late ones": lambda each: str(each.num_late),
            "median ms": lambda each: short(each.ms),
            "most ms": lambda each: short(each.most),
        },
        (0, 1),
        "Late links",
    )
    rest = len(story.spells) - MOST_SPELLS
    return found + (f'<p class="r-note">{times(rest, "shorter spell")} left out.</p>' if rest > 0 else "")


def _decisions(decisions: Sequence[DecisionOutcome]) -> str:
    if not decisions:
        return "<p>Nothing was changed.</p>"
    return table(
        decisions,
        {
            "": lambda each: str(each.number),
            "decision": lambda each: each.action,
            "what runs then": lambda each: str(each.plan),
            "why": lambda each: each.reason,
            "late since": lambda each: maybe(each.began, str),
            "verified and proposed": lambda each: f"after {each.made}",
            "runs from": lambda each: each.outcome if each.first is None else str(each.first),
            "simulated ms": lambda each: _from_to(each.ms_now, each.ms_then),
            "measured ms": lambda each: _from_to(each.measured_before, each.measured_after),
            "verdict": lambda each: (
                f"{'taken back' if each.taken_back else 'stays'}: {each.verdict}" if each.verdict else None
            ),
            "saved": lambda each: maybe(each.saved, seconds),
        },
        (0, 1, 2, 3, 9),
        "Decisions",
    )


def _from_to(before: float | None, after: float | None) -> str:
    return f"{maybe(before, short) or '–'} → {maybe(after, short) or '–'}"


def _faults(story: RunStory) -> str:
    found = ""
    if story.faults:
        rows = {"iteration": lambda each: maybe(each.iteration, str), "what": lambda each: each.what}
        found += table(story.faults, rows, (0, 1), "Faults")
    if story.counters:
        counted = {"counted": lambda each: each[0], "number": lambda each: short(each[1])}
        found += table(story.counters, counted, (0,), "Counters")
    return found
