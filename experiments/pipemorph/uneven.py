"""Uneven microbatches, a straggler of their own: dynamic against frozen dispatch where microbatches differ in length.

    python -m experiments.pipemorph.uneven                        seconds
    python -m experiments.pipemorph.uneven --backend threads      two minutes

Not in the paper. 8 ranks, 32 microbatches; all ops of a microbatch take 10 ms times its factor, drawn from a log-
normal distribution and scaled to a mean of 1, so that the work is the same. No link is late. The memory is that of
frozen `zb` (`1f1b` its own). Five draws of each spread.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import penstock as ps
from experiments.common.results import Row, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import best_known, pair, simulated
from experiments.pipemorph.setups import CHAIN_8, late
from experiments.pipemorph.systems import Setting, job_of
from penstock.control import Configuration
from penstock.control.configuration import peaks
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

MODEL = CHAIN_8
SPREADS = (0.0, 0.25, 0.5, 1.0)
"""Standard deviations of the factors' logarithms."""
DRAWS = 5
WAYS = (("1f1b", "frozen"), ("1f1b", "dynamic"), ("zb", "frozen"), ("zb", "dynamic"))


def rows(backend: Backend, spreads: Sequence[float] = SPREADS, draws: int = DRAWS) -> Iterator[Row]:
    """A row for each spread, draw and way; one draw alone where it is measured."""
    cases = []
    for spread in spreads:
        for draw in range(draws if backend.name == "simulate" and spread else 1):
            costs = replace(MODEL.costs, uneven=drawn(spread, draw))
            for name, dispatch in WAYS:
                schedule = ps.build(name, MODEL.num_ranks, MODEL.num_microbatches)
                runs = Configuration(schedule, dispatch, (), peaks(schedule, MODEL.costs))
                job = replace(job_of(MODEL, runs), costs=costs)
                keys = {"spread": spread, "draw": draw, "way": f"{name}, {dispatch}"}
                cases.append(Case(keys, Setting(job, runs), late({})))
    yield from backend.run(cases)


def drawn(spread: float, draw: int) -> tuple[float, ...]:
    """How many times as long the ops of each microbatch take; 1 on average."""
    numbers = random.Random(f"{spread} {draw}")
    factors = [numbers.lognormvariate(0.0, spread) for _ in range(MODEL.num_microbatches)]
    mean = fmean(factors)
    return tuple(factor / mean for factor in factors)


def of(rows: Sequence[Row], spread: float, way: str) -> list[Row]:
    return [row for row in rows if row["spread"] == spread and row["way"] == way]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    spreads = list(dict.fromkeys(row["spread"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    yield "iteration (ms) by spread, mean of the draws, simulated/measured; how many times faster than frozen"
    body = []
    for way in ways:
        cells = []
        for spread in spreads:
            mine, frozen = of(rows, spread, way), of(rows, spread, way.replace("dynamic", "frozen"))
            text = pair(mine[0]) if mine[0]["measured_ms"] else f"{fmean(map(simulated, mine)):.0f}"
            faster = fmean(map(best_known, frozen)) / fmean(map(best_known, mine))
            cells.append(text if way.endswith("frozen") else f"{text} ({faster:.2f})")
        body.append([way, *cells])
    yield from table(["", *(f"{spread:g}" for spread in spreads)], body)


def chart(rows: Sequence[Row]) -> Figure:
    spreads = list(dict.fromkeys(row["spread"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    return bar_chart(
        [f"spread {spread:g}" for spread in spreads],
        [Bars(way, [fmean(map(best_known, of(rows, spread, way))) for spread in spreads]) for way in ways],
        title="Uneven microbatches: frozen and dynamic dispatch",
        note="8 ranks, 32 microbatches, the same work in all; spread: deviation of the logarithm of their lengths",
        y=Axis("iteration (ms)"),
        show="{:.0f}".format,
    )


if __name__ == "__main__":
    command("uneven", __doc__, rows, lines, chart, seeds=range(DRAWS))
