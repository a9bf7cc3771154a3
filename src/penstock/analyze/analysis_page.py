"""An analysis as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from operator import itemgetter
from typing import Any

import numpy as np

from penstock.analyze.run_analysis import RunAnalysis
from penstock.analyze.what_if import WhatIf
from penstock.analyze.words import facts, headline, milliseconds, more
from penstock.draw.chart import Axis, Bars, Figure, Level, Line, heat_map, line_chart, stacked_chart
from penstock.draw.report_page import PageNumber, inline, maybe, section, sides, table, timelines, whole_page
from penstock.draw.scale import percent, short
from penstock.schedule import Op
from penstock.simulation import TimedOp, Timeline, simulate

LEFT = 120.0
"""Pixels at which charts begin."""
MOST_OPS = 4000
"""Ops that the drawn step may have; more would make the page slow."""
FACTORS = (0.9, 0.97, 1.03, 1.1, 1.25, 1.6, 2.5)
"""Where the colours of factors change."""


def to_page(found: RunAnalysis) -> str:
    """The page."""
    m = found.metrics
    numbers = [
        PageNumber(f"{m.slowdown:.3f}", "slowdown S: replayed over ideal", "lost"),
        PageNumber(milliseconds(m.measured), "a step, measured"),
        PageNumber(milliseconds(m.ideal), "a step, all ops of a kind alike", "saved"),
        PageNumber(f"{m.launch_slowdown:.3f}", "times as long by late starts"),
        PageNumber(percent(m.replay_error), "median error of the replay"),
    ]
    return whole_page(
        title=f"{found.name}: what slowed it",
        name=found.name,
        headline=headline(found),
        more=more(found),
        numbers=numbers,
        facts=facts(found),
        sections=_sections(found),
        data=found.to_json(),
    )


NOTES = {
    "Causes": "What a step would be shorter by without each alone. Costs do not add up: a second straggler may hide "
    "behind the first, and show when that is gone.",
    "What if": "Each tried by simulation, late starts as they were. In flight: the most microbatches that a rank "
    "holds, in its share of the model.",
    "Steps": "Measured, and replayed from each op's own time with nobody started late. Ideal: all compute ops of a "
    "kind as long as their mean, communication as its median.",
    "Workers": "How many times as long as its like each worker takes for the same work, whatever microbatches and "
    "stage it has.",
    "Microbatches": "How long the microbatches of each step are, against their mean: the shortest, the middle one "
    "and the longest over all replicas.",
    "One step": "The step whose time is the middle one, of the replica that computes longest: as measured, and with "
    "every op as long as its mean.",
    "Where a step's time goes": "Shares of the longest chain of ops of which each began when the one before had "
    "ended. Only what is on it is worth making faster.",
}


def _sections(found: RunAnalysis) -> list[str]:
    drawn = _timelines(found)
    bodies = {
        "Causes": _causes(found),
        "What if": _what_ifs(found),
        "Steps": inline(lambda width: _steps(found, width)),
        "Workers": inline(lambda width: _workers(found, width)) if found.effects.by_worker.size > 1 else "",
        "Microbatches": inline(lambda width: _microbatches(found, width)),
        "One step": drawn or "",
        "Where a step's time goes": inline(lambda width: _critical(found, width)),
    }
    parts = [section(title, body, escape(NOTES[title])) for title, body in bodies.items() if body]
    return [*parts, section("The study's measures", _measures(found), escape(_sources(found)))]


def _causes(found: RunAnalysis) -> str:
    if not found.causes:
        return "<p>Nothing costs more than 0.2% of a step.</p>"
    return table(
        enumerate(found.causes, start=1),
        {
            "": lambda each: str(each[0]),
            "kind": lambda each: each[1].kind,
            "what": lambda each: each[1].what,
            "cost a step": lambda each: milliseconds(each[1].cost),
            "share": lambda each: percent(each[1].share),
            "factor": lambda each: maybe(each[1].factor, _three),
            "what helps": lambda each: each[1].help,
        },
        (0, 1, 2, 6),
        "Causes",
    )


def _what_ifs(found: RunAnalysis) -> str:
    columns: dict[str, Callable[[WhatIf], str | None]] = {
        "kind": lambda each: each.kind,
        "change": lambda each: each.what,
        "a step then": lambda each: milliseconds(each.time),
        "times as fast": lambda each: f"{each.speedup:.3f}",
        "in flight": lambda each: maybe(each.memory, _three),
    }
    return table(found.what_ifs, columns, (0, 1), "What if")


def _three(value: float) -> str:
    return f"{value:.3g}"


def _steps(found: RunAnalysis, width: int) -> Figure:
    measured, replayed, ideal = found.run.measured, found.run.replayed, found.metrics.ideal
    places = range(len(measured))
    lines = [
        Line("measured", places, measured.tolist(), "blue"),
        Line("replayed", places, replayed.tolist(), "navy", "dotted"),
    ]
    axis = Axis("ms a step", low=0.9 * min(ideal, float(replayed.min())))
    label = "Time of each recorded step, measured and replayed"
    return _over_steps(lines, width, y=axis, levels=[Level(ideal, f"ideal {short(ideal)}")], height=340, label=label)


def _over_steps(lines: Sequence[Line], width: int, **more: Any) -> Figure:
    x = Axis("recorded steps, in order", low=-0.5, high=len(lines[0].x) - 0.5)
    return line_chart(lines, x=x, **sides(width, LEFT), **more)


def _workers(found: RunAnalysis, width: int) -> Figure:
    by = found.effects.by_worker
    return heat_map(
        [f"rank {rank}" for rank in range(by.shape[1])],
        by.T.tolist(),
        x=Axis("replica"),
        first=-0.5,
        steps=FACTORS,
        **sides(width, LEFT),
        label="How many times as long as its like each worker takes",
    )


def _microbatches(found: RunAnalysis, width: int) -> Figure:
    flat = found.effects.by_microbatch.reshape(len(found.effects.by_microbatch), -1)
    rows, places = np.nanquantile(flat, [1, 0.5, 0], axis=1).tolist(), range(len(flat))
    lines = [
        Line("longest", places, rows[0], "brick"),
        Line("middle", places, rows[1], "blue"),
        Line("shortest", places, rows[2], "grey"),
    ]
    label = "Lengths of the microbatches of each step"
    return _over_steps(lines, width, y=Axis("times the mean"), height=260, label=label)


def _timelines(found: RunAnalysis) -> str | None:
    """The middle step, of the replica that computes longest: as measured, and with every op as long as its mean."""
    fit, table_ = found.fit, found.run.table
    if fit is None or fit.schedule.num_ops > MOST_OPS:
        return None
    step = int(np.argsort(found.run.replayed, kind="stable")[len(found.run.replayed) // 2])
    replica = int(np.argmax(sum(rows[step].sum(axis=(1, 2)) for rows in fit.times.values())))
    ops = table_.compute[table_.replica[table_.compute] == replica]
    ops = ops[np.lexsort((table_.start[step, ops], table_.rank[ops]))]
    rows: list[list[int]] = [[] for _ in fit.schedule.order]
    for op in ops.tolist():
        rows[int(table_.rank[op])].append(op)
    timed = [
        TimedOp(rank, Op(*named), float(table_.start[step, op]), float(table_.end[step, op]))
        for rank, row in enumerate(rows)
        for op, named in zip(row, fit.schedule.order[rank])
    ]
    measured = Timeline(fit.schedule, tuple(timed), (), (0.0,) * fit.schedule.num_ranks, "measured")
    even = simulate(fit.schedule, fit.even_costs(), links=fit.links)
    return timelines(
        [measured, even], [f"step {int(table_.steps[step])}, replica {replica}", "all ops of a kind alike"]
    )


def _critical(found: RunAnalysis, width: int) -> Figure:
    names = list(found.critical.by_kind)[:6]
    ranks = sorted(found.critical.by_rank)[:10]
    kinds = Bars("share", [found.critical.by_kind[name] for name in names])
    rows = names + [f"compute of rank {rank}" for rank in ranks]
    values = list(kinds.values) + [found.critical.by_rank[rank] for rank in ranks]
    return stacked_chart(
        rows,
        [Bars("share of the longest chain", values, hue="blue")],
        x=Axis("share of the longest chain", low=0.0),
        show=percent,
        width=width,
        label="Shares of the longest chain by kind of op and by rank",
    )


def _measures(found: RunAnalysis) -> str:
    m = found.metrics
    rows = [("S", "all ops of a kind alike", f"{m.slowdown:.4f}")]
    rows += [("S_t", name, f"{value:.4f}") for name, value in sorted(m.by_kind.items(), key=lambda each: -each[1])]
    worst = sorted(m.by_worker.items(), key=lambda each: -each[1])[:8]
    rows += [("S_w", f"rank {rank} of replica {replica}", f"{value:.4f}") for (replica, rank), value in worst]
    links = sorted(m.by_link.items(), key=lambda each: -each[1])[:8]
    rows += [("by link", f"{a} to {b}, all replicas", f"{value:.4f}") for (a, b), value in links]
    rows += [
        ("M_W", "won back by the 3% slowest workers made ideal", percent(m.worst_workers)),
        ("M_S", "won back by the last stage's ranks made ideal", percent(m.last_stage)),
    ]
    columns = {name: itemgetter(place) for place, name in enumerate(("measure", "of", "value"))}
    return table(rows, columns, (0, 1), "The study's measures")


def _sources(found: RunAnalysis) -> str:
    said = "As defined in Understanding Stragglers in Large Model Training Using What-if Analysis (OSDI 2025)."
    return " ".join([said, *(f"Note: {note}." for note in found.notes)])
