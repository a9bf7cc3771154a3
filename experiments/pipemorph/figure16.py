"""Figure 16: one late link, the first or the last, 30 or 60 ms, for models of 7B to 60B.

    python -m experiments.pipemorph.figure16                        half a minute
    python -m experiments.pipemorph.figure16 --backend threads      about 6 minutes

Costs and microbatches: see setups.py. The paper in words: PipeMorph is up to 3.71 times faster than 1F1B (7B, 60
ms, last) and 3.49 times faster than ZB (14B, 60 ms, last); from 30 to 60 ms iterations grow by 1.07 (PipeMorph),
1.49 (1F1B), 1.69 (ZB), 1.30 (PipeMorph-CPU) on average; PipeMorph takes 19.3% less than PipeMorph-CPU with the
first link 60 ms late, 38.4% less with the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import behind, best_known, pair
from experiments.pipemorph.setups import MODELS, late
from experiments.pipemorph.systems import HOSTED, SYSTEMS, setting
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

NAMES = ("7B", "14B", "30B", "60B")
SHOWN = (*SYSTEMS, HOSTED)
DELAYS = (30.0, 60.0)
GROWTH = {"1f1b": 1.49, "zb": 1.69, "pipemorph-cpu": 1.30, "pipemorph": 1.07}
"""The paper's growth from 30 to 60 ms."""


def rows(backend: Backend, names: Sequence[str] = NAMES) -> Iterator[Row]:
    """A row for each model, place, delay and system."""
    cases = []
    for name in names:
        model = MODELS[name]
        for place, link in (("first", model.first), ("last", model.last)):
            for ms in DELAYS:
                for system in SHOWN:
                    keys = {"model": name, "link": place, "delay_ms": ms, "system": system}
                    cases.append(Case(keys, setting(system, model, {link: ms}), late({link: ms})))
    yield from backend.run(cases)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "iteration (ms), simulated/measured"
    groups = list(dict.fromkeys((row["model"], row["link"], row["delay_ms"]) for row in rows))

    def at(group: tuple[str, str, float], system: str) -> Row:
        return find(rows, model=group[0], link=group[1], delay_ms=group[2], system=system)

    body = [[f"{g[0]}, {g[1]}, {g[2]:g} ms", *(pair(at(g, system)) for system in SHOWN)] for g in groups]
    yield from table(["", *SHOWN], body)

    def faster(group: tuple[str, str, float], than: str) -> float:
        return best_known(at(group, than)) / best_known(at(group, "ours"))

    for than, paper in (("1f1b", 3.71), ("zb", 3.49)):
        most = max(groups, key=lambda group: faster(group, than))
        where = ", ".join(map(str, most))
        yield f"ours is up to {faster(most, than):.2f} times faster than {than} ({where} ms); paper {paper}"
    for group in groups:
        slower = list(behind([at(group, system) for system in SHOWN]))
        if slower:
            yield f"{group[0]}, {group[1]}, {group[2]:g} ms: ours takes as many times as long as {', '.join(slower)}"
    for system in SHOWN:
        grown = [
            best_known(at((m, p, 60.0), system)) / best_known(at((m, p, 30.0), system))
            for m, p, d in groups
            if d == 30
        ]
        paper_growth = f"{GROWTH[system]:.2f}" if system in GROWTH else "-"
        yield f"from 30 to 60 ms {system} takes {fmean(grown):.2f} times as long on average; paper {paper_growth}"
    for place, paper in (("first", 0.193), ("last", 0.384)):
        saved = fmean(1 - 1 / faster(g, "pipemorph-cpu") for g in groups if g[1] == place and g[2] == 60)
        yield f"{place} link 60 ms late: ours takes {saved:.1%} less than pipemorph-cpu; paper {paper:.1%}"


def chart(rows: Sequence[Row]) -> Figure:
    groups = list(dict.fromkeys((row["model"], row["link"]) for row in rows))
    series = [
        Bars(system, [best_known(find(rows, model=m, link=p, delay_ms=60.0, system=system)) for m, p in groups])
        for system in SHOWN
        if system not in ("dynamic, direct", "dynamic")
    ]
    return bar_chart(
        [f"{model}, {place}" for model, place in groups],
        series,
        title="Figure 16: one link 60 ms late, by model and place",
        y=Axis("iteration (ms)"),
        show="{:.0f}".format,
        width=960,
    )


if __name__ == "__main__":
    command("figure16", __doc__, rows, lines, chart)
