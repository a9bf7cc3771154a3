"""Figure 3: one link 10 to 30 ms late, in a data-parallel group or between pipeline ranks.

    python -m experiments.pipemorph.figure3                        a second
    python -m experiments.pipemorph.figure3 --backend threads      half a minute

7B model, 8 nodes as (TP 1, DP 2, PP 4), ZB as it is. The paper: iterations grow up to 8.04 times where the link is in
a data-parallel group, and at most 2.24 times where it carries the pipeline's messages. The mesh, its ring (whose
window is calibrated on the 8.04) and the two kinds of delay are those of `figure19.py`; nothing is calibrated on the
2.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.command import command
from experiments.pipemorph.figure19 import COSTS, DELAYS, LINK, MESH, MODEL, RING, moved_under_pp
from experiments.pipemorph.iterations import best_known, times
from experiments.pipemorph.meshes import KINDS, MeshCase, run
from penstock.control import Configuration
from penstock.draw.chart import Axis, Figure, Line, line_chart

PLACES = {"DP": MESH, "PP": moved_under_pp(MESH)}
PAPER = {"DP": 8.04, "PP": 2.24}
"""Slowdowns at 30 ms."""


def rows(backend: Backend, delays: Sequence[float] = DELAYS) -> Iterator[Row]:
    """A row for each kind of delay, place of the link and delay."""
    runs = Configuration(MODEL.zb, "frozen", (), MODEL.caps)
    cases = [
        MeshCase({"place": place, "delay_ms": ms, "kind": kind}, COSTS, runs, mesh, RING, LINK, ms, kind)
        for kind in KINDS
        for place, mesh in PLACES.items()
        for ms in delays
    ]
    yield from run(backend, cases)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    delays = sorted({row["delay_ms"] for row in rows})
    yield "growth of an iteration by delay of the link (ms), simulated/measured; paper at 30 ms"
    body = []
    for kind in KINDS:
        for place in PLACES:
            base = find(rows, kind=kind, place=place, delay_ms=0.0)
            mine = [times(find(rows, kind=kind, place=place, delay_ms=ms), base) for ms in delays[1:]]
            body.append([f"{place}, {kind}", *mine, f"{PAPER[place]:.2f}"])
    yield from table(["", *(f"{ms:g}" for ms in delays[1:]), "paper"], body)


def chart(rows: Sequence[Row]) -> Figure:
    parts: list[Line] = []
    for place, kind, hue in (("DP", "latency", "brick"), ("PP", "latency", "blue"), ("PP", "queue", "navy")):
        mine = [row for row in rows if (row["place"], row["kind"]) == (place, kind)]
        grown = [best_known(row) / best_known(mine[0]) for row in mine]
        parts.append(Line(f"{place}, {kind}", [row["delay_ms"] for row in mine], grown, hue=hue))
    parts.append(Line("paper", [30.0, 30.0], list(PAPER.values()), stroke="none", hue="grey"))
    return line_chart(
        parts,
        title="Figure 3: growth of an iteration by delay of one link",
        note="7B, (TP 1, DP 2, PP 4); the window of the rings is calibrated on the paper's 8.04",
        x=Axis("delay (ms)"),
        y=Axis("growth", low=1.0),
    )


if __name__ == "__main__":
    command("figure3", __doc__, rows, lines, chart, backends=("simulate", "threads"))
