"""Figure 18: delays that change faster than iterations, traces A, B and C on the 7B model.

    python -m experiments.pipemorph.figure18                        4 minutes: 2 minutes of each trace
    python -m experiments.pipemorph.figure18 --backend threads      4 minutes: 20 s of each trace, stretched by 3

4 ranks, 12 microbatches, ops of 10 ms; see traces.py. The paper: up to 2.8 times the throughput of 1F1B and ZB; its
limits say 5% from the best under the fastest changes. `ours` keeps to the memory of frozen `zb`; `pipemorph` and
`ours, host` may hold as many activations more as there are microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.results import Row
from experiments.pipemorph import throughput
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.command import command
from experiments.pipemorph.setups import CHAIN_4
from penstock.draw.chart import Figure

PAPER = {"pipemorph": "up to 2.8 times 1f1b, zb"}


def rows(backend: Backend, every: int = 12) -> Iterator[Row]:
    """A row for each trace and system; a clairvoyant search after so many simulated iterations, 0 for none."""
    simulated = backend.name == "simulate"
    minutes, every = (2.0, every) if simulated else (1 / 3, 0)
    yield from throughput.rows(backend, CHAIN_4, ("A", "B", "C"), minutes, every)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield from throughput.lines(rows, PAPER)


def chart(rows: Sequence[Row]) -> Figure:
    return throughput.chart(rows, "Figure 18: throughput on traces A, B and C", {})


if __name__ == "__main__":
    command("figure18", __doc__, rows, lines, chart, jobs=7, seeds=[1])
