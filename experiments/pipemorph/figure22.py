"""Figure 22: a bursty hour on 8 stages, with median, mean and 99th percentile of the paper's delays.

    python -m experiments.pipemorph.figure22                        8 minutes: a quarter of an hour of it
    python -m experiments.pipemorph.figure22 --backend threads      5 minutes: all of it within 1.5, stretched by 3
    python -m experiments.pipemorph.figure22 --minutes 60           half an hour: all of it on 8 ranks
    python -m experiments.pipemorph.figure22 --ranks 16             half an hour: a quarter of it on 16 ranks

The paper trains a 140B model on 128 GPUs, 8 stages; here 8 ranks, 32 microbatches and ops of 10 ms stand for one of
its pipelines. The paper: 45.9 iterations a minute (PipeMorph), 41.4 (1F1B), 33.6 (ZB): 1.36 times ZB, 1.11 times
1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import penstock as ps
from experiments.common.results import Row
from experiments.pipemorph import throughput
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.command import command
from experiments.pipemorph.setups import OP, Model
from penstock.draw.chart import Figure

PAPER = {"1f1b": "41.4, 1.23", "zb": "33.6, 1.00", "pipemorph": "45.9, 1.36"}

MORE = {"minutes": (0.0, "of the trace; 0 for the usual"), "ranks": (8, "of the pipeline")}


def rows(backend: Backend, minutes: float = 0.0, ranks: int = 8) -> Iterator[Row]:
    """A row for each system.

    Args:
        minutes: of the trace, which has all of its hour in them; 0 for 15 where simulated and 1.5 where measured.
        ranks: with 4 microbatches each.
    """
    simulated = backend.name == "simulate"
    usual, every = (15.0, 40) if simulated else (1.5, 0)
    chain = Model(f"{ranks} stages", ps.Costs.uniform(ranks, OP, OP, OP), 4 * ranks)
    yield from throughput.rows(backend, chain, ("bursty",), minutes or usual, every)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield from throughput.lines(rows, PAPER)


def chart(rows: Sequence[Row]) -> Figure:
    return throughput.chart(
        rows, "Figure 22: throughput on a bursty trace", {"1f1b": 1.23, "zb": 1.0, "pipemorph": 1.36}
    )


if __name__ == "__main__":
    command("figure22", __doc__, rows, lines, chart, jobs=7, seeds=[1], more=MORE)
