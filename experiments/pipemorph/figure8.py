"""Figure 8: pipeline delay and bubble rate by delay of a link, for slacks of 1 to 5 (Theorem 1). Simulation alone.

    python -m experiments.pipemorph.figure8      seconds

N = 30 microbatches and t = 10 ms are the paper's. Assumed: 4 stages, the first link late, the same slack on all
links. Frozen order, delegated links. Two rules after the warm-up: "alternate" (I, F, I, F, ...), which is what
Theorem 1 is about, and "priority" (I before F before W), as Algorithm 3 prints it.

A delay is absorbed up to (slack - 1) t, says the theorem; past that, each ms costs 2 N / (slack + 1) by its proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import simulated
from experiments.pipemorph.setups import CHAIN_4, OP, Model, late
from experiments.pipemorph.systems import Setting, job_of
from penstock.control import Configuration
from penstock.control.configuration import peaks
from penstock.draw.chart import Axis, Figure, Hue, Line, Mark, line_chart
from penstock.planning import slow_link_schedule

MODEL = Model("4 stages", CHAIN_4.costs, 30)
SLACKS = (1, 2, 3, 4, 5)
DELAYS = tuple(5.0 * step for step in range(13))
HUES: tuple[Hue, ...] = ("blue", "brick", "green", "amber", "purple")
NOTICED = 2.0
"""Times the delay itself from which on a run counts as in cascade."""


def rows(backend: Backend) -> Iterator[Row]:
    """A row for each rule, slack and delay."""
    cases = []
    for rule in ("alternate", "priority"):
        for slack in SLACKS:
            warmup = [1 + slack * (MODEL.num_ranks - 1 - rank) for rank in range(MODEL.num_ranks)]
            schedule = slow_link_schedule(MODEL.costs, MODEL.num_microbatches, warmup=warmup, rule=rule)
            runs = Configuration(schedule, "frozen", (MODEL.first,), peaks(schedule, MODEL.costs))
            cases += [
                Case(
                    {"rule": rule, "slack": slack, "delay_ms": ms},
                    Setting(job_of(MODEL, runs), runs),
                    late({MODEL.first: ms}, base=0.0),
                )
                for ms in DELAYS
            ]
    yield from backend.run(cases)


def lost(rows: Sequence[Row], rule: str, slack: int, ms: float) -> float:
    """What a delay costs the whole iteration (ms)."""
    row, without = (find(rows, rule=rule, slack=slack, delay_ms=at) for at in (ms, 0.0))
    return simulated(row) - simulated(without)


def absorbed(rows: Sequence[Row], rule: str, slack: int) -> float:
    """The largest delay (ms) up to which none costs more than `NOTICED` times itself."""
    cascades = [ms for ms in DELAYS if lost(rows, rule, slack, ms) > NOTICED * ms]
    return max(ms for ms in DELAYS if not cascades or ms < cascades[0])


def lines(rows: Sequence[Row]) -> Iterator[str]:
    t, num = OP, MODEL.num_microbatches
    for rule in ("alternate", "priority"):
        yield f"rule {rule}: delay of the pipeline (ms), and its bubble rate, by slack and delay of the link"
        body = []
        for slack in SLACKS:
            cells = [
                f"{lost(rows, rule, slack, ms):.0f} ({find(rows, rule=rule, slack=slack, delay_ms=ms)['bubble']:.0%})"
                for ms in DELAYS[::2]
            ]
            a, b = DELAYS[-2:]
            slope = (lost(rows, rule, slack, b) - lost(rows, rule, slack, a)) / (b - a)
            cascade = absorbed(rows, rule, slack) < a
            body.append(
                [
                    f"slack {slack}",
                    *cells,
                    f"{absorbed(rows, rule, slack):g} / {(slack - 1) * t:g}",
                    f"{slope:.1f} / {2 * num / (slack + 1):.1f}" if cascade else "-",
                ]
            )
        yield from table(
            ["", *(f"{ms:g} ms" for ms in DELAYS[::2]), "absorbed / Theorem 1 (ms)", "ms a ms / proof"], body
        )


def chart(rows: Sequence[Row]) -> Figure:
    lines = [
        Line(
            f"slack {slack}" + (", priority rule" if rule == "priority" else ""),
            DELAYS,
            [lost(rows, rule, slack, ms) for ms in DELAYS],
            hue=hue,
            stroke="solid" if rule == "alternate" else "dotted",
        )
        for rule in ("alternate", "priority")
        for slack, hue in zip(SLACKS, HUES, strict=True)
        if rule == "alternate" or slack in (3, 5)
    ]
    return line_chart(
        lines,
        title="Figure 8: what a late first link costs, by slack",
        note="4 stages, 30 microbatches, 10 ms ops; strict alternation; marks: (slack - 1) t of Theorem 1",
        x=Axis("delay of the link (ms)"),
        y=Axis("delay of the pipeline (ms)"),
        marks=[Mark((slack - 1) * OP, f"{slack}", hue=hue) for slack, hue in zip(SLACKS, HUES, strict=True)],
    )


if __name__ == "__main__":
    command("figure8", __doc__, rows, lines, chart, backends=("simulate",))
