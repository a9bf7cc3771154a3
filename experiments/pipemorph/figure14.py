"""Figure 14: one iteration of the 7B model with the link between the last two stages 30 ms late, op by op.

    python -m experiments.pipemorph.figure14                        a second
    python -m experiments.pipemorph.figure14 --backend threads      20 seconds

4 ranks, 12 microbatches, costs of `gpt2-7b` (stretched by 3 where measured). The paper: ZB 703 ms (57.4% bubbles),
PipeMorph-CPU 579 ms (48.8%), PipeMorph 398 ms (25.3%), 30 ms above the run without delay, so 368.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import pair, times
from experiments.pipemorph.setups import MODELS, late
from experiments.pipemorph.systems import HOSTED, SYSTEMS, setting
from penstock.control import run_once
from penstock.draw.svg import to_svg

MODEL = MODELS["7B"]
DELAY = 30.0
PAPER = {"zb": (703, 0.574), "pipemorph-cpu": (579, 0.488), "pipemorph": (398, 0.253)}
"""Milliseconds and bubble rate."""
PAPER_WITHOUT = 368
"""Milliseconds without delay."""


def rows(backend: Backend) -> Iterator[Row]:
    """The run without delay, and a row for each system with it."""
    cases = [Case({"system": "zb", "delay_ms": 0.0}, setting("zb", MODEL, {}), late({}))]
    for system in (*SYSTEMS, HOSTED):
        runs = setting(system, MODEL, {MODEL.last: DELAY})
        cases.append(Case({"system": system, "delay_ms": DELAY}, runs, late({MODEL.last: DELAY})))
    yield from backend.run(cases)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    without = find(rows, system="zb", delay_ms=0.0)
    yield f"without delay: {pair(without)} ms simulated/measured; paper {PAPER_WITHOUT}"
    body = []
    for row in rows:
        if row is without:
            continue
        paper = PAPER.get(row["system"])
        body.append(
            [
                row["system"],
                pair(row),
                times(row, without),
                f"{row.get('measured_bubble', row['bubble']):.1%}",
                f"{paper[0]}, {paper[0] / PAPER_WITHOUT:.2f}, {paper[1]:.1%}" if paper else "-",
            ]
        )
    yield from table(["", "ms", "slowdown", "bubbles", "paper"], body)


def chart(rows: Sequence[Row]) -> str:
    timelines, titles = [], []
    for system in ("zb", "pipemorph", "ours"):
        runs = setting(system, MODEL, {MODEL.last: DELAY})
        timelines.append(run_once(runs.job, runs.configuration, late({MODEL.last: DELAY})))
        titles.append(f"{system}: {pair(find(rows, system=system, delay_ms=DELAY))} ms")
    return to_svg(timelines, titles=titles, width=960)


if __name__ == "__main__":
    command("figure14", __doc__, rows, lines, chart)
