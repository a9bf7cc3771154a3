"""Figure 5 (and 4): ZB on 4 stages, 12 microbatches, ops of 10 ms; the first link late by 0, 10 and 20 ms.

    python -m experiments.pipemorph.figure5                        a second
    python -m experiments.pipemorph.figure5 --backend threads      20 seconds

The order is made without delay and stays: 390, 400 and 440 ms in the paper. Links are delegated, since the figure
is about dependencies alone. Beside it, what re-planning and dynamic dispatch make of the same delay (410 ms is the
least that is possible at 20).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import pair
from experiments.pipemorph.setups import CHAIN_4, late
from experiments.pipemorph.systems import setting
from penstock.control import run_once
from penstock.draw.svg import to_svg

MODEL = CHAIN_4
DELAYS = (0.0, 10.0, 20.0)
PAPER = {0.0: 390, 10.0: 400, 20.0: 440}


def rows(backend: Backend) -> Iterator[Row]:
    """A row for each system and delay."""
    yield from backend.run(
        [
            Case(
                {"system": system, "delay_ms": ms}, setting(system, MODEL, {(0, 1): ms}), late({(0, 1): ms}, base=0.0)
            )
            for system in ("pipemorph-cpu", "pipemorph", "dynamic")
            for ms in DELAYS
        ]
    )


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "iteration (ms), simulated/measured"
    names = {"pipemorph-cpu": "frozen zb", "pipemorph": "re-planned", "dynamic": "dynamic"}
    body = [[name, *(pair(find(rows, system=key, delay_ms=ms)) for ms in DELAYS)] for key, name in names.items()]
    body.append(["paper, frozen zb", *(f"{PAPER[ms]}" for ms in DELAYS)])
    yield from table(["", *(f"{ms:g} ms" for ms in DELAYS)], body)


def chart(rows: Sequence[Row]) -> str:
    shown = [("pipemorph-cpu", 0.0), ("pipemorph-cpu", 10.0), ("pipemorph-cpu", 20.0), ("dynamic", 20.0)]
    timelines, titles = [], []
    for system, ms in shown:
        runs = setting(system, MODEL, {(0, 1): ms})
        timelines.append(run_once(runs.job, runs.configuration, late({(0, 1): ms}, base=0.0)))
        measured = pair(find(rows, system=system, delay_ms=ms))
        titles.append(
            f"{'dynamic' if system == 'dynamic' else 'frozen zb'}, first link {ms:g} ms late: {measured} ms"
        )
    return to_svg(timelines, titles=titles, width=960)


if __name__ == "__main__":
    command("figure5", __doc__, rows, lines, chart)
