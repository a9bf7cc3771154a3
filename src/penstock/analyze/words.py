"""An analysis in words: one sentence, and the few that follow it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.analyze.run_analysis import RunAnalysis
from penstock.analyze.what_if import WhatIf
from penstock.draw.scale import percent, short

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
        lines.append(f"What each costs per step: {'; '.join(costs)}.")
        if found.causes[0].help:
            lines.append(f"Against the first: {found.causes[0].help}.")
    helps = [each for each in found.what_ifs if each.speedup >= WORTH][:2]
    if helps:
        listed = "; ".join(f"{each.what}, {each.speedup:.2f} times as fast" for each in helps)
        lines.append(f"By simulation would help most: {listed}.")
    kinds = list(found.critical.by_kind.items())[:2]
    if kinds:
        lines.append(
            "Of the longest chain of a step " + " and ".join(f"{share:.0%} is {name}" for name, share in kinds) + "."
        )
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
    table = found.run.table
    trace = table.trace
    return [
        ("steps", str(len(table.steps))),
        ("replicas", str(trace.num_replicas)),
        ("ranks", str(trace.num_ranks)),
        ("stages", str(trace.num_stages)),
        ("microbatches", str(int(np.isfinite(found.effects.by_microbatch[0, 0]).sum()))),
        ("schedule", "several orders" if found.fit is None else found.fit.name),
        ("ops", f"{len(table.steps) * table.num_ops:,}"),
    ]
