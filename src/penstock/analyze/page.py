"""An analysis for people: in words, and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from penstock.analyze.causes import SlowdownCause
from penstock.analyze.run_analysis import RunAnalysis
from penstock.analyze.what_if import WhatIf
from penstock.draw.chart import Axis, Figure, Hue, Level, Line, heat_map, line_chart
from penstock.draw.report_page import PageNumber, inline_section, maybe, section, sides, table, timelines, whole_page
from penstock.draw.style import percent, short
from penstock.schedule import Op
from penstock.simulation import TimedOp, Timeline, simulate

WORTH = 1.01
"""Speedups from which a change is worth a sentence."""


def milliseconds(ms: float) -> str:
    """`42 ms`, `2.31 s`."""
    return f"{ms / 1e3:.3g} s" if abs(ms) >= 1e3 else f"{short(ms)} ms"


def headline(found: RunAnalysis) -> str:
    """How much slower the run is, and the first cause."""
    times = found.metrics.measured / found.metrics.ideal
    slow = f"{found.name} takes {times:.2f} times as long as if all ops of a kind took as long and none started late"
    if not found.causes:
        return f"{slow}; no single cause costs anything worth naming."
    return f"{slow}; the first cause is {found.causes[0].what}."


def more(found: RunAnalysis) -> list[str]:
    """What each cause costs, what would help most, and how far to believe it."""
    m = found.metrics
    lines = [
        f"A step takes {milliseconds(m.measured)}. Replayed from its ops' own times it takes "
        f"{milliseconds(m.replayed)}, off by {percent(found.replay_error)} in the median; if all ops of a kind also "
        f"took as long, it would take {milliseconds(m.ideal)}.",
        f"Ranks wait for {found.bubble_ratio:.0%} of a step.",
    ]
    if found.causes:
        costs = (f"{milliseconds(each.cost)} ({each.share:.1%}) because of {each.what}" for each in found.causes[:3])
        lines.append(f"What each costs per step: {'; '.join(costs)}. Against the first: {found.causes[0].help}.")
    helps = [each for each in found.what_ifs if each.speedup >= WORTH][:2]
    if helps:
        listed = "; ".join(f"{each.what}, {each.speedup:.2f} times as fast" for each in helps)
        lines.append(f"By simulation would help most: {listed}.")
    return lines


def prediction_table(found: RunAnalysis, tried: Sequence[WhatIf]) -> str:
    """What was tried, with its error bar and what was assumed."""
    lines = [f"{found.name} takes {found.metrics.measured:,.1f} ms a step, as measured"]
    width = max(len(each.what) for each in tried)
    lines.append(f"{'schedule':<{width}}  {'ms':>9}  {'from':>9}  {'to':>9}  times as fast")
    for each in tried:
        times = "  ".join(f"{ms:9,.1f}" for ms in (each.time, *(each.bar or ())))
        lines.append(f"{each.what:<{width}}  {times}  {each.speedup:.3f}")
    assumed = dict.fromkeys(said for each in tried for said in each.assumed)
    return "\n".join([*lines, *(f"assumed: {said}" for said in assumed)])


def facts(found: RunAnalysis) -> list[tuple[str, str]]:
    schedule = "not known" if found.fit is None else found.fit.name
    return [*((noun, f"{count:,}") for noun, count in found.counts.items()), ("schedule", schedule)]


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


def _sections(found: RunAnalysis) -> list[str]:
    parts = [_causes(found), _what_ifs(found), inline_section("Steps", partial(_steps, found), STEPS)]
    if found.effects.by_worker.size > 1:
        parts.append(inline_section("Workers", partial(_workers, found), WORKERS))
    parts.append(inline_section("Microbatches", partial(_microbatches, found), MICROBATCHES))
    if drawn := _timelines(found):
        parts.append(section("One step", drawn, ONE_STEP))
    notes = "".join(f" Note: {note}." for note in found.notes)
    return [*parts, section("The study's measures", _measures(found), escape(f"{STUDY}{notes}"))]


STEPS = (
    "Measured, and replayed from each op's own time with nobody started late. Ideal: all compute ops of a kind as "
    "long as their mean, communication as its median."
)
WORKERS = (
    "How many times as long as its like each worker takes for the same work, whatever microbatches and stage it has."
)
MICROBATCHES = (
    "How long the microbatches of each step are, against their mean: the shortest, the middle one and the longest "
    "over all replicas."
)
ONE_STEP = (
    "The step whose time is the middle one, of the replica that computes longest: as measured, and with every op as "
    "long as its mean."
)
STUDY = "As defined in Understanding Stragglers in Large Model Training Using What-if Analysis (OSDI 2025)."


def _causes(found: RunAnalysis) -> str:
    if not found.causes:
        return section("Causes", "<p>Nothing costs more than 0.2% of a step.</p>")
    columns: dict[str, Callable[[tuple[int, SlowdownCause]], str | None]] = {
        "": lambda each: str(each[0]),
        "kind": lambda each: each[1].kind,
        "what": lambda each: each[1].what,
        "cost a step": lambda each: milliseconds(each[1].cost),
        "share": lambda each: percent(each[1].share),
        "factor": lambda each: maybe(each[1].factor, "{:.3g}".format),
        "what helps": lambda each: each[1].help,
    }
    return section(
        "Causes",
        table(enumerate(found.causes, start=1), columns, (0, 1, 2, 6), "Causes"),
        "What a step would be shorter by without each alone. Costs do not add up: a second straggler may hide behind "
        "the first, and show when that is gone.",
    )


def _what_ifs(found: RunAnalysis) -> str:
    columns: dict[str, Callable[[WhatIf], str | None]] = {
        "kind": lambda each: each.kind,
        "change": lambda each: each.what,
        "a step then": lambda each: milliseconds(each.time),
        "times as fast": lambda each: f"{each.speedup:.3f}",
        "in flight": lambda each: maybe(each.memory, "{:.3g}".format),
    }
    return section(
        "What if",
        table(found.what_ifs, columns, (0, 1), "What if"),
        "Each tried by simulation, late starts as they were. In flight: the most microbatches that a rank holds, in "
        "its share of the model.",
    )


def _over_steps(width: int, rows: Mapping[str, Sequence[float]], hues: Sequence[Hue], **more: Any) -> Figure:
    """Lines over the recorded steps; the line of what is replayed is dotted."""
    lines = [
        Line(name, range(len(row)), row, hue, "dotted" if name == "replayed" else "solid")
        for (name, row), hue in zip(rows.items(), hues, strict=True)
    ]
    x = Axis("recorded steps, in order", low=-0.5, high=len(lines[0].x) - 0.5, is_whole=True)
    return line_chart(lines, x=x, **sides(width, LEFT), **more)


def _steps(found: RunAnalysis, width: int) -> Figure:
    measured, replayed, ideal = found.run.measured, found.run.replayed, found.metrics.ideal
    return _over_steps(
        width,
        {"measured": measured.tolist(), "replayed": replayed.tolist()},
        ("blue", "navy"),
        y=Axis("ms a step", low=0.9 * min(ideal, float(replayed.min()))),
        levels=[Level(ideal, f"ideal {short(ideal)}")],
        height=340,
        label="Time of each recorded step, measured and replayed",
    )


def _workers(found: RunAnalysis, width: int) -> Figure:
    by = found.effects.by_worker
    return heat_map(
        [f"rank {rank}" for rank in range(by.shape[1])],
        by.T.tolist(),
        x=Axis("replica", is_whole=True),
        first=-0.5,
        steps=FACTORS,
        **sides(width, LEFT),
        label="How many times as long as its like each worker takes",
    )


def _microbatches(found: RunAnalysis, width: int) -> Figure:
    flat = found.effects.by_microbatch.reshape(len(found.effects.by_microbatch), -1)
    rows = np.nanquantile(flat, [1, 0.5, 0], axis=1).tolist()
    return _over_steps(
        width,
        dict(zip(("longest", "middle", "shortest"), rows, strict=True)),
        ("brick", "blue", "grey"),
        y=Axis("times the mean"),
        height=260,
        label="Lengths of the microbatches of each step",
    )


def _timelines(found: RunAnalysis) -> str:
    """The middle step, of the replica that computes longest: as measured, and with every op as long as its mean."""
    fit, table_ = found.fit, found.run.table
    if fit is None or fit.schedule.num_ops > MOST_OPS:
        return ""
    step = int(np.argsort(found.run.replayed, kind="stable")[len(found.run.replayed) // 2])
    replica = int(np.argmax(sum(rows[step].sum(axis=(1, 2)) for rows in fit.times.values())))
    ops = table_.compute[table_.replica[table_.compute] == replica]
    ops = ops[np.lexsort((table_.start[step, ops], table_.rank[ops]))]
    timed = [
        TimedOp(int(table_.rank[op]), Op(*named), float(table_.start[step, op]), float(table_.end[step, op]))
        for op, named in zip(ops.tolist(), chain.from_iterable(fit.schedule.order), strict=True)
    ]
    measured = Timeline(fit.schedule, tuple(timed), (), (0.0,) * fit.schedule.num_ranks, "measured")
    even = simulate(fit.schedule, fit.even_costs(), links=fit.links)
    return timelines(
        [measured, even], [f"step {int(table_.steps[step])}, replica {replica}", "all ops of a kind alike"]
    )


def _measures(found: RunAnalysis) -> str:
    m = found.metrics
    rows: list[tuple[str, str, float]] = [("S", "all ops of a kind alike", m.slowdown)]
    rows += [("S_t", name, value) for name, value in _largest(m.by_kind, len(m.by_kind))]
    for each, value in _largest(m.by_worker, 8):
        replica, rank = each.split(":")
        rows.append(("S_w", f"rank {rank} of replica {replica}", value))
    rows += [
        ("by link", f"{each.replace('>', ' to ')}, all replicas", value) for each, value in _largest(m.by_link, 8)
    ]
    shown = [(*row[:2], f"{row[2]:.4f}") for row in rows]
    shown.append(("M_W", "won back by the 3% slowest workers made ideal", percent(m.worst_workers)))
    shown.append(("M_S", "won back by the last stage's ranks made ideal", percent(m.last_stage)))
    columns = {name: itemgetter(place) for place, name in enumerate(("measure", "of", "value"))}
    return table(shown, columns, (0, 1), "The study's measures")


def _largest(by: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    return sorted(by.items(), key=lambda each: -each[1])[:most]
