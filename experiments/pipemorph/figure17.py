"""Figure 17: several late links at once on the 14B model, 30 ms each; and how far from the best that is possible.

    python -m experiments.pipemorph.figure17                        a minute, most of it the search for the best
    python -m experiments.pipemorph.figure17 --backend threads      four minutes

8 ranks, 32 microbatches, ops of 10 ms. The paper: over the four settings PipeMorph takes 51.6% less than 1F1B,
57.5% less than ZB, 23.1% less than PipeMorph-CPU. The first link alone is there besides.

`best`: the shortest iteration under the memory of frozen `zb` that `ps.plan` finds in some seconds with the delays
known, or any system's where that is shorter (PipeMorph's own needs more memory and does not count); `bound`: no
schedule under that memory is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import penstock as ps
from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import best_known, pair, simulated
from experiments.pipemorph.setups import CHAIN_8, Link, late
from experiments.pipemorph.systems import SYSTEMS, setting
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

MODEL = CHAIN_8
DELAY = 30.0
CASES: Mapping[str, tuple[Link, ...]] = {
    "first": ((0, 1),),
    "two adjacent": ((0, 1), (1, 2)),
    "two skipping": ((0, 1), (2, 3)),
    "first and last": ((0, 1), (6, 7)),
    "three skipping": ((0, 1), (3, 4), (6, 7)),
}
PAPER = {"1f1b": 0.516, "zb": 0.575, "pipemorph-cpu": 0.231}
"""How much less than these PipeMorph takes, over the last four."""
TARGET = 0.03
"""Above the best that is known."""


def rows(backend: Backend, names: Sequence[str] = tuple(CASES), search: float = 10.0) -> Iterator[Row]:
    """A row for each setting and system, and one for the best that is known; `search` seconds each, 0 for no best."""
    cases = []
    for name in names:
        delays = dict.fromkeys(CASES[name], DELAY)
        cases += [
            Case({"links": name, "system": system}, setting(system, MODEL, delays), late(delays))
            for system in SYSTEMS
        ]
    found = list(backend.run(cases))
    yield from found
    for name in names if search > 0 else ():
        plan = ps.plan(
            MODEL.costs,
            MODEL.num_ranks,
            MODEL.num_microbatches,
            ps.Links(dict.fromkeys(CASES[name], DELAY)),
            memory_limit=list(MODEL.caps),
            time_limit=search,
        )
        within = [
            simulated(find(found, links=name, system=system)) for system in ("dynamic, direct", "dynamic", "ours")
        ]
        yield {
            "links": name,
            "system": "best",
            "simulated_ms": [min(plan.makespan, *within)],
            "measured_ms": [],
            "bound_ms": plan.lower_bound,
        }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "iteration (ms), simulated/measured"
    body, names = [], list(dict.fromkeys(row["links"] for row in rows))
    for name in names:
        best, ours = find(rows, links=name, system="best"), find(rows, links=name, system="ours")
        over = simulated(ours) / simulated(best) - 1
        cells = [pair(find(rows, links=name, system=system)) for system in SYSTEMS]
        real = f"{best_known(ours) / simulated(best) - 1:+.1%}" if ours["measured_ms"] else "-"
        body.append([name, *cells, pair(best), f"{best['bound_ms']:.0f}", f"{over:+.1%}", real])
    yield from table(["", *SYSTEMS, "best", "bound", "ours over best", "measured"], body)
    for system, paper in PAPER.items():
        saved = [
            1 - best_known(find(rows, links=name, system="ours")) / best_known(find(rows, links=name, system=system))
            for name in names
            if name != "first"
        ]
        yield f"ours takes {fmean(saved):.1%} less than {system}; paper {paper:.1%}"
    yield f"target: within {TARGET:.0%} of the best"


def chart(rows: Sequence[Row]) -> Figure:
    names = list(dict.fromkeys(row["links"] for row in rows))
    series = [
        Bars(system, [best_known(find(rows, links=name, system=system)) for name in names])
        for system in (*SYSTEMS, "best")
        if system not in ("dynamic, direct", "dynamic")
    ]
    return bar_chart(
        names,
        series,
        title="Figure 17: several links 30 ms late",
        note="8 ranks, 32 microbatches, ops of 10 ms; best: the shortest that is known under the memory of zb",
        y=Axis("iteration (ms)"),
        show="{:.0f}".format,
        width=960,
    )


if __name__ == "__main__":
    command("figure17", __doc__, rows, lines, chart)
