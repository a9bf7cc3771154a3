"""A run as one self-contained HTML page: it loads nothing, and says everything without its script too.

Every run has its record: loss, rate, speed and bubble by step, memory, one of the last steps, notices. A run whose
links were watched has the story of these links and of what was decided, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

from penstock.draw.charts.axis import Axis
from penstock.draw.charts.figure import Figure
from penstock.draw.charts.parts import Level
from penstock.draw.report_page import NARROW, WIDTH, PageNumber, both, inline, section, sides, table, whole_page
from penstock.draw.scale import percent, short
from penstock.report import figures
from penstock.report.run_record import RunRecord
from penstock.report.run_story import DecisionOutcome, Iteration, RunStory
from penstock.report.words import alarms, headline, more, reaction, seconds, sentence, times, way_name, words_of

_MEASURED = (
    "Measured: the median iteration since what the change answers began, and with it. Saved: measured iterations "
    "with the change against that median, while the same links are late."
)
MOST_ROWS = 400
"""Iterations that the table at the end lists."""


def to_page(story: RunStory | None, record: RunRecord | None = None) -> str:
    """The report as one HTML page that loads nothing.

    Args:
        story: of the run's links; None if they were not watched.
        record: of the run's steps; None if it has none, as a rehearsal. One of the two is needed.

    Raises:
        ValueError: neither is given.
    """
    told = story or record
    if told is None:
        raise ValueError("a page of nothing: give the story of a run, or its record")
    first, *others = sentences(story, record)
    script = "" if story is None else files("penstock.report").joinpath("report.js").read_text(encoding="utf-8")
    return whole_page(
        title=f"{told.name}: run report",
        name=told.name,
        headline=first,
        more=others,
        numbers=[*_of_steps(record), *([] if story is None else _numbers(story))],
        facts=told.facts,
        sections=[
            *([] if record is None else _steps(record)),
            *([] if story is None else _sections(story)),
            *([] if record is None else _end(record)),
        ],
        data=to_json(story, record),
        script=script,
    )


def to_json(story: RunStory | None, record: RunRecord | None = None) -> dict[str, Any]:
    """What the page says, without its timelines, as a JSON object."""
    value: dict[str, Any] = {} if story is None else story.to_json()
    if record is None:
        return value
    return {"name": record.name, "facts": dict(record.facts), **value, "run": record.to_json()}


def sentences(story: RunStory | None, record: RunRecord | None = None) -> list[str]:
    """The headline, and the sentences below it."""
    of_steps = [] if record is None else words_of(record)
    if story is None:
        return of_steps
    learned = record is not None and record.noun == "step"  # the story counts iterations itself
    return [headline(story), *(of_steps if learned else ()), *more(story)]


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


def _of_steps(record: RunRecord | None) -> list[PageNumber]:
    """The few numbers of a run's steps that matter, large."""
    if record is None:
        return []
    found = [PageNumber(f"{record.known(m)[-1][1]:,.4g}", what) for m, what in LARGE.items() if record.known(m)]
    if found and record.columns.get("loss", (0,))[-1] is None:
        found[0] = PageNumber("not finite", LARGE["loss"])
    measured, simulated = record.bubbles
    if measured is not None and simulated is not None:
        found.append(
            PageNumber(percent(measured), f"bubbles in one of the last steps; simulated {percent(simulated)}")
        )
    return found


def _steps(record: RunRecord) -> list[str]:
    """Loss, learning rate, speed and bubbles by step; memory; one of the last steps."""
    found = []
    many = -(-len(record.steps) // figures.MOST_POINTS)
    note = f"Each point is the mean of {many} {record.noun}s." if many > 1 else ""
    for title, label, metrics, show in CURVES:
        values = [value for metric in metrics for _, value in record.known(metric)]
        if not values:
            continue
        low = 0.95 * min(values) if title == "Loss" and min(values) > 0 else None
        simulated = record.bubbles[1] if title == "Bubbles" else None
        levels = [] if simulated is None else [Level(simulated, f"simulated {percent(simulated)}")]
        axis = Axis(label, low=low, show=show)
        found.append(section(title, inline(partial(figures.curve, record, metrics, axis, levels=levels)), note))
    return [*found, *_memory_of(record), *_one_step(record)]


def _memory_of(record: RunRecord) -> list[str]:
    peaks, state = record.ended.get("peak_memory"), record.ended.get("state")
    found = ""
    if peaks:
        one = "rank" if len(peaks) == record.ended.get("num_ranks") else "process"
        names = [f"{one} {number}" for number in range(len(peaks))]
        found += inline(partial(figures.held_by, names, {"at most": peaks}))
    if state:
        names = [f"rank {number}" for number in range(len(state))]
        found += inline(partial(figures.held_by, names, {name: [row[name] for row in state] for name in state[0]}))
    note = "Above: the most that each process held at any time. Below: what of it is for weights."
    return [section("Memory of processes", found, note if peaks and state else "")] if found else []


def _one_step(record: RunRecord) -> list[str]:
    noun = "pass" if record.ended.get("updating") else record.noun
    why = "It has too many ops to be drawn here; timeline.html has them." if record.ended else "Written when it ends."
    drawn = figures.one_above_the_other(record.shown) or f"<p>{why}</p>"
    note = "One of the last, measured; and simulated with the op times that were measured." if record.shown else ""
    return [section(f"One {noun}", drawn, note)]


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
    if story.saved is None:
        found.append(PageNumber("not known", "of it saved: too few or too noisy iterations"))
    elif story.saved < 0:
        found.append(PageNumber(seconds(-story.saved), "more by changes that were slower, measured", "lost"))
    else:
        found.append(
            PageNumber(seconds(story.saved) if story.saved > 0 else "none", "of it saved, measured", "saved")
        )
    first = next((each for each in story.decisions if each.stayed), None)
    after = None if first is None else reaction(story, first)
    if after is not None:
        found.append(PageNumber(times(after, "iteration"), "from late to the new plan running"))
    if story.error is not None:
        found.append(PageNumber(percent(story.error), "median error of the simulation"))
    return found


def _sections(story: RunStory) -> list[str]:
    found = [
        section(
            "Iteration time",
            _hover(lambda width: figures.iteration_times(story, width), story),
            f"Iterations count from 0. Undisturbed: {story.undisturbed_from}. First configuration kept: measured "
            "where it ran, else simulated under links and op times as measured in each iteration. Purple: a "
            "decision, where it began to run.",
        )
    ]
    if story.links:
        found.append(section("Links", _hover(lambda width: figures.link_heat(story, width), story) + _spells(story)))
    said = _decisions(story.decisions) + "".join(f"<p>{escape(each)}.</p>" for each in story.unanswered)
    found.append(section("Decisions", said, f"{escape(alarms(story))}. {_MEASURED}"))
    if story.faults or story.counters:
        found.append(section("Faults", _faults(story)))
    timelines = figures.one_above_the_other(story.shown)
    if timelines is not None:
        found.append(section("Before and after", timelines, _source(story)))
    if (memory := story.memory) is not None:
        drawn = inline(lambda width: figures.memory(memory, width))
        found.append(section("Memory", drawn, f"Most held by each rank at any time, {memory.source}."))
    found.append(_rows(story))
    return found


def _hover(draw: Callable[[int], Figure], story: RunStory) -> str:
    """A figure over iterations, with what the script needs to know of its axis."""
    drawn = {width: draw(width) for width in (WIDTH, NARROW)}

    def place(width: int) -> str:
        figure, (low, high) = drawn[width], figures.ends(story)
        top, bottom = figure.plot or (0.0, figure.height)
        numbers = {**sides(width), "low": low, "high": high, "top": top, "bottom": bottom}
        said = escape(f"{figure.label}. The arrow keys go from iteration to iteration.")
        at = " ".join(f'data-{name}="{value:.10g}"' for name, value in numbers.items())
        return f' data-hover tabindex="0" role="group" aria-label="{said}" {at}'

    return both(lambda width: drawn[width].inline(), place)


def _source(story: RunStory) -> str:
    measured = all(each.timeline.source == "measured" for each in story.shown)
    return "Measured." if measured else "Simulated under links and op times as measured in these iterations."


def _spells(story: RunStory) -> str:
    if not story.spells:
        return f"<p>No link was late by {short(story.smallest_delay)} ms or more.</p>"
    rows = [
        (s.name, f"{s.first} to {s.last}", str(s.num_late), short(s.ms), short(s.most)) for s in story.spells[:12]
    ]
    head = ("late link", "iterations", "late ones", "median ms", "most ms")
    rest = len(story.spells) - len(rows)
    left = f'<p class="r-note">{times(rest, "shorter spell")} left out.</p>' if rest else ""
    return table(head, rows, (0, 1), "Late links") + left


def _decisions(decisions: Sequence[DecisionOutcome]) -> str:
    if not decisions:
        return "<p>Nothing was changed.</p>"
    head = (
        "", "decision", "what runs then", "why", "late since", "verified and proposed", "runs from",
        "simulated ms", "measured ms", "verdict", "saved",
    )  # fmt: skip
    rows = []
    for each in decisions:
        runs = str(each.first) if each.first is not None else each.outcome
        rows.append(
            (
                str(each.number),
                each.action,
                str(each.plan),
                each.reason,
                _maybe(each.began, str),
                f"after {each.made}",
                runs,
                f"{_maybe(each.ms_now, short)} → {short(each.ms_then)}",
                f"{_maybe(each.measured_before, short)} → {_maybe(each.measured_after, short)}",
                _verdict(each),
                _maybe(each.saved, seconds),
            )
        )
    return table(head, rows, (0, 1, 2, 3, 9), "Decisions")


def _verdict(each: DecisionOutcome) -> str:
    if not each.verdict:
        return "–"
    return f"{'taken back' if each.taken_back else 'stays'}: {each.verdict}"


def _maybe(value: float | None, show: object) -> str:
    return "–" if value is None else str(show(value))  # type: ignore[operator]


def _faults(story: RunStory) -> str:
    found = ""
    if story.faults:
        rows = [(_maybe(each.iteration, str), each.what) for each in story.faults]
        found += table(("iteration", "what"), rows, (0, 1), "Faults")
    if story.counters:
        found += table(
            ("counted", "number"), [(name, short(value)) for name, value in story.counters], (0,), "Counters"
        )
    return found


def _rows(story: RunStory) -> str:
    """Every iteration as a row, folded away."""
    shown = story.iterations[:MOST_ROWS]
    rows = [
        (
            str(each.number),
            str(each.decision) if each.decision else "start",
            short(each.ms),
            _maybe(each.simulated, short),
            _maybe(each.kept, short),
            _worst(each, story),
        )
        for each in shown
    ]
    head = ("iteration", "runs", "measured ms", "simulated ms", "kept ms", "slowest link")
    more_rows = len(story.iterations) - len(shown)
    left = f'<p class="r-note">{times(more_rows, "more iteration")} in the JSON.</p>' if more_rows else ""
    return (
        f"<section><details><summary>All iterations as a table</summary>{table(head, rows, (), 'Iterations')}{left}"
        "</details></section>"
    )


def _worst(each: Iteration, story: RunStory) -> str:
    if not each.delays:
        return "–"
    link = max((link for link in story.links if link in each.delays), key=lambda link: each.delays[link])
    return f"{way_name(link)}: {short(each.delays[link])} ms"
