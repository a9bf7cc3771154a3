"""What Figures 18 and 22 share: throughput of all systems on traces, and how far ours is from clairvoyant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.clairvoyant import clairvoyant
from experiments.pipemorph.iterations import simulated
from experiments.pipemorph.loops import SYSTEMS, loop, run
from experiments.pipemorph.setups import Model
from experiments.pipemorph.systems import HOSTED
from experiments.pipemorph.traces import summary, trace_of
from penstock.draw.chart import Axis, Bars, Figure, Level, bar_chart

TARGET_ZB, TARGET_CLAIRVOYANT = 1.36, 0.03
"""At least so many times ZB's throughput, and at most so far above the clairvoyant schedule on average."""


def rows(
    backend: Backend, model: Model, names: Sequence[str], minutes: float, every: int, seed: int = 1
) -> Iterator[Row]:
    """A row for each trace and system.

    Args:
        minutes: of trace.
        every: iterations from one clairvoyant search to the next (simulated alone: some seconds each); 0 for none.
    """
    loops = []
    for name in names:
        conditions = trace_of(name, model.links, minutes, seed)
        keys = {"trace": name, "minutes": minutes, "delays": summary(conditions, minutes * 60e3, model.links)}
        each_keys = [{**keys, "system": system} for system in SYSTEMS]
        loops += [
            loop(each["system"], model, each, conditions, minutes * 60e3) for each in each_keys if backend.runs(each)
        ]
    for each, row in zip(loops, run(backend, loops), strict=True):
        if every and row["system"] in ("ours", HOSTED):
            picked = list(zip(row["starts"], row["simulated_ms"], strict=True))[::every]
            over = [ms / clairvoyant(each.job, each.conditions, at) - 1 for at, ms in picked]
            row |= {"over_clairvoyant": fmean(over), "most_over_clairvoyant": max(over), "searches": len(over)}
        yield row


def rates(rows: Sequence[Row], trace: str, system: str) -> tuple[float, float | None]:
    """Iterations a minute, simulated and measured."""
    row = find(rows, trace=trace, system=system)
    real = 60e3 / fmean(row["measured_ms"]) if row["measured_ms"] else None
    return 60e3 / simulated(row), real


def lines(rows: Sequence[Row], paper: dict[str, str]) -> Iterator[str]:
    """By trace: a table, and the paper's numbers."""
    for trace in dict.fromkeys(row["trace"] for row in rows):
        mine = [row for row in rows if row["trace"] == trace]
        shown = ", ".join(f"{name} {value:.1f}" for name, value in mine[0]["delays"].items())
        yield f"trace {trace}, {mine[0]['minutes']:.3g} min, delays (ms): {shown}"
        yield "iterations a minute, simulated/measured"
        zb = rates(mine, trace, "zb")
        body = []
        for row in mine:
            rate = rates(mine, trace, row["system"])
            real = rate[1] is not None and zb[1] is not None
            body.append(
                [
                    row["system"],
                    f"{rate[0]:.1f}" + (f"/{rate[1]:.1f}" if real else ""),
                    f"{rate[0] / zb[0]:.2f}" + (f"/{rate[1] / zb[1]:.2f}" if real else ""),
                    f"{row['over_clairvoyant']:+.1%}" if "over_clairvoyant" in row else "-",
                    f"{row['peak_over_cap']:.2f}" if "peak_over_cap" in row else "-",
                    str(row["decisions"]),
                    paper.get(row["system"], "-"),
                ]
            )
        head = ["", "rate", "times zb", "over clairvoyant", "peak/cap", "decisions", "paper"]
        yield from table(head, body)
    for system in ("ours", HOSTED):
        over = [row["over_clairvoyant"] for row in rows if row["system"] == system and "over_clairvoyant" in row]
        if over:
            yield f"{system} over clairvoyant, mean of the traces: {fmean(over):+.1%}"
    yield (
        f"targets: ours at least {TARGET_ZB} times zb, at most {TARGET_CLAIRVOYANT:.0%} over clairvoyant on average, "
        "peak/cap at most 1"
    )


def chart(rows: Sequence[Row], title: str, paper: dict[str, float]) -> Figure:
    """Throughput as a multiple of ZB's, by trace."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    series = []
    for system in SYSTEMS:
        found = [rates(rows, trace, system) for trace in traces]
        units = [rates(rows, trace, "zb") for trace in traces]
        values = [(a[1] or a[0]) / (b[1] or b[0]) for a, b in zip(found, units, strict=True)]
        series.append(Bars(system, values, paper=[paper.get(system)] * len(traces)))
    return bar_chart(traces, series, title=title, y=Axis("throughput, times zb"), levels=[Level(TARGET_ZB, "1.36")])
