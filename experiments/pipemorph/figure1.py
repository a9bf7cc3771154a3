"""Figure 1: what minor delays cost 1F1B and ZB, and how much of it is dependency bubbles, how much blocking.

    python -m experiments.pipemorph.figure1                        seconds
    python -m experiments.pipemorph.figure1 --backend threads      about 3 minutes

The paper's figure has no numbers in words but those of Figure 15 at 60 ms: 14B model, 8 ranks. Assumed: 32
microbatches with ops of 10 ms, 0 to 60 ms. Each system runs on direct links, which hold 2 messages before their
sender stands still, and with the late link delegated. What the second loses are dependency bubbles, what the first
loses besides is blocking. `busy`: the same delay as occupancy on a direct link, one message after the other, which
is what the authors' injector does (a spinning kernel before each send). The first link is there too: that is where
messages queue up, since ZB runs 15 forwards ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import best_known, times
from experiments.pipemorph.setups import CHAIN_8, late
from experiments.pipemorph.systems import setting
from penstock.cost import LinkCondition
from penstock.cost.conditions import Constant
from penstock.draw.chart import Axis, Figure, Line, line_chart

MODEL = CHAIN_8
DELAYS = (0.0, 20.0, 40.0, 60.0)
LINKS = {"first": MODEL.first, "last": MODEL.last}
PAPER = {("1f1b", "last", 60.0): 2.70, ("zb", "last", 60.0): 4.24}


def rows(backend: Backend, delays: Sequence[float] = DELAYS) -> Iterator[Row]:
    """A row for each system, link, delay and kind of link."""
    cases = []
    for system in ("1f1b", "zb"):
        for place, link in LINKS.items():
            for ms in delays:
                direct = setting(system, MODEL, {link: ms})
                delegated = replace(direct, configuration=replace(direct.configuration, delegated=(link,)))
                busy = replace(late({}), conditions={link: LinkCondition(occupancy=Constant(ms))})
                for kind, runs, conditions in (
                    ("direct", direct, late({link: ms})),
                    ("delegated", delegated, late({link: ms})),
                    ("busy", direct, busy),
                ):
                    keys = {"system": system, "link": place, "delay_ms": ms, "transport": kind}
                    cases.append(Case(keys, runs, conditions))
    yield from backend.run(cases)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "iteration as a multiple of that without delay, simulated/measured, and the shares of what is lost"
    body = []
    for row in rows:
        if row["transport"] != "direct" or row["delay_ms"] == 0:
            continue
        keys = {name: row[name] for name in ("system", "link")}
        base = find(rows, **keys, delay_ms=0.0, transport="direct")
        without = best_known(base)
        other = find(rows, **keys, delay_ms=row["delay_ms"], transport="delegated")
        dependency, lost = best_known(other) - without, best_known(row) - without
        paper = PAPER.get((row["system"], row["link"], row["delay_ms"]))
        body.append(
            [
                f"{row['system']}, {row['link']} link, {row['delay_ms']:g} ms",
                times(row, base),
                times(find(rows, **keys, delay_ms=row["delay_ms"], transport="busy"), base),
                f"{dependency:.0f} ms",
                f"{lost - dependency:.0f} ms",
                "-" if paper is None else f"{paper:.2f}",
            ]
        )
    yield from table(["", "slowdown", "busy", "dependency", "blocking", "paper"], body)


def chart(rows: Sequence[Row]) -> Figure:
    lines = []
    for system in ("1f1b", "zb"):
        for place in LINKS:
            for kind in ("direct", "delegated"):
                mine = [
                    row for row in rows if (row["system"], row["link"], row["transport"]) == (system, place, kind)
                ]
                without = best_known(find(mine, delay_ms=0.0))
                lines.append(
                    Line(
                        f"{system}, {place} link" + (", delegated" if kind == "delegated" else ""),
                        [row["delay_ms"] for row in mine],
                        [best_known(row) / without for row in mine],
                        hue={"1f1bfirst": "blue", "1f1blast": "navy", "zbfirst": "brick", "zblast": "amber"}[
                            system + place
                        ],
                        stroke="solid" if kind == "direct" else "dashed",
                    )
                )
    paper = Line("paper, last link", [60.0, 60.0], [2.70, 4.24], stroke="none", hue="grey")
    return line_chart(
        [*lines, paper],
        title="Figure 1: slowdown by delay of one link",
        note="solid: direct, dashed: delegated; the gap between them is head-of-line blocking",
        x=Axis("delay (ms)"),
        y=Axis("slowdown", low=1.0),
    )


if __name__ == "__main__":
    command("figure1", __doc__, rows, lines, chart)
