"""PipeMorph: what it claims beside what was found here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from statistics import fmean, median
from typing import Any

from experiments.claims.claim import Claim, Lines, Value, as_saved, read_paper, rows_of
from experiments.common.results import Row, find
from experiments.pipemorph import figure5
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.iterations import measured, simulated

BY = {"simulated": simulated, "measured": measured}


def slower(keys: dict[str, Any], base: dict[str, Any]) -> Value:
    """An iteration as a multiple of another."""

    def value(rows: Iterable[Row], how: str) -> float | None:
        one, other = (BY[how](find(list(rows), **each)) for each in (keys, base))
        return None if one is None or other is None else one / other

    return value


def iteration(**keys: Any) -> Value:
    """An iteration in ms."""
    return lambda rows, how: BY[how](find(rows, **keys))


WITHOUT_SEARCH: dict[str, dict[str, Any]] = {"figure17": {"search": 0.0}, "figure18": {"every": 0}}
"""What leaves out a figure's search, which takes most of its time; no claim here is of what it finds."""


@cache
def fresh(figure: str) -> list[Row]:
    """A figure simulated anew."""
    module = import_module(f"experiments.pipemorph.{figure}")
    return as_saved(module.rows(Backend(), **WITHOUT_SEARCH.get(figure, {})))


def claim(figure: str, what: str, paper: float | None, value: Value, by_the_clock: bool = True, **more: Any) -> Claim:
    name = f"{figure.replace('figure', 'Figure ').replace('table', 'Table ').capitalize()}"
    return Claim(
        name,
        what,
        paper,
        f"pipemorph/{figure}-simulate",
        value,
        f"pipemorph/{figure}-threads" if by_the_clock else "",
        partial(fresh, figure),
        **more,
    )


def _late(system: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"system": system, "delay_ms": ms, **more}


ZB = _late("zb", 0.0)
DIRECT: dict[str, Any] = {"link": "last", "transport": "direct"}
MS: dict[str, Any] = {"digits": 0, "show": "{:.0f} ms"}
CLAIMS = (
    *(
        claim(
            "figure1",
            f"{name}, the last link 60 ms late",
            paper,
            slower(_late(system, 60.0, **DIRECT), _late(system, 0.0, **DIRECT)),
        )
        for name, system, paper in (("1F1B", "1f1b", 2.70), ("ZB", "zb", 4.24))
    ),
    *(
        claim(
            "figure3",
            f"the late link in {where}",
            paper,
            slower({"place": place, "delay_ms": 30.0, "kind": kind}, {"place": place, "delay_ms": 0.0, "kind": kind}),
        )
        for where, place, kind, paper in (
            ("a data-parallel group", "DP", "latency", 8.04),
            ("the pipeline, as latency", "PP", "latency", 2.24),
            ("the pipeline, as a queue", "PP", "queue", 2.24),
        )
    ),
    *(
        claim("figure5", f"ZB, c0 = {ms:g} ms", paper, iteration(system="pipemorph-cpu", delay_ms=ms), **MS)
        for ms, paper in figure5.PAPER.items()
    ),
    claim("figure5", "dynamic, c0 = 20 ms", None, iteration(system="dynamic", delay_ms=20.0), **MS),
    *(
        claim("figure14", name, paper, slower(_late(system, 30.0), ZB))
        for name, system, paper in (
            ("ZB", "zb", 1.91),
            ("PipeMorph-CPU", "pipemorph-cpu", 1.57),
            ("PipeMorph", "pipemorph", 1.08),
            ("ours", "ours", None),
            ("ours, with host memory", "ours, host", None),
        )
    ),
    *(
        claim("figure15", f"{name}, 60 ms", paper, slower(_late(system, 60.0), _late(base, 0.0)))
        for name, system, base, paper in (
            ("1F1B", "1f1b", "1f1b", 2.70),
            ("ZB", "zb", "zb", 4.24),
            ("PipeMorph-CPU", "pipemorph-cpu", "pipemorph-cpu", 2.15),
            ("PipeMorph", "pipemorph", "pipemorph", 1.13),
            ("ours", "ours", "zb", None),
        )
    ),
    *(
        claim(
            "figure16",
            f"{name}, {model}, last link 60 ms late",
            paper,
            slower(*({"model": model, "link": "last", "delay_ms": 60.0, "system": each} for each in (one, other))),
        )
        for name, model, paper, one, other in (
            ("1F1B over ours", "7B", 3.71, "1f1b", "ours"),
            ("1F1B over ours with host memory", "7B", 3.71, "1f1b", "ours, host"),
            ("ZB over ours", "14B", 3.49, "zb", "ours"),
            ("ours over PipeMorph", "7B", None, "ours", "pipemorph"),
        )
    ),
    *(
        claim(
            "figure17",
            f"{name} over ours, {links}",
            None,
            slower({"links": links, "system": system}, {"links": links, "system": "ours"}),
        )
        for links in ("two adjacent", "first and last", "three skipping")
        for name, system in (("1F1B", "1f1b"), ("ZB", "zb"))
    ),
    *(
        claim(
            "figure18",
            f"ZB over {name}, trace {trace}",
            None,
            slower({"trace": trace, "system": "zb"}, {"trace": trace, "system": system}),
        )
        for trace in ("A", "B", "C")
        for name, system in (("ours", "ours"), ("ours with host memory", "ours, host"), ("PipeMorph", "pipemorph"))
    ),
    *(
        claim(
            "figure19",
            f"{name}, {kind}, 30 ms",
            paper,
            slower(_late(system, 30.0, kind=kind), _late("zb", 0.0, kind=kind)),
        )
        for kind in ("latency", "queue")
        for name, system, paper in (
            ("ZB (calibrated)", "zb", 8.04),
            ("moved", "falcon", 2.23),
            ("moved and absorbed", "pipemorph", 1.14),
            ("ours", "ours", None),
        )
    ),
    *(
        claim(
            "table2",
            f"{setup.partition(' ')[0]}, {name}",
            None,
            slower(_late(system, 30.0, setup=setup), _late("zb", 0.0, setup=setup)),
        )
        for setup in ("7B (1, 1, 4)", "14B (1, 1, 8)", "30B (2, 4, 8)", "60B (4, 2, 8)", "140B (8, 2, 8)")
        for name, system in (("moved", "moved"), ("ours", "ours"))
    ),
)


def _part(figure: str, part: str) -> Lines:
    """What a function of a figure's module prints, which is not loaded before."""
    return lambda rows: getattr(import_module(f"experiments.pipemorph.{figure}"), part)(rows)


def over_clairvoyant(system: str) -> str:
    """Of Figure 18, on the mean of the traces."""
    found = [row["over_clairvoyant"] for row in rows_of("pipemorph/figure18-simulate") if row["system"] == system]
    return f"{fmean(found):.1%}"


def dynamic_over_ours() -> str:
    """Of Figure 18, the least and the most of the traces."""
    rows = rows_of("pipemorph/figure18-simulate")
    gains = [
        slower({"trace": trace, "system": "ours"}, {"trace": trace, "system": "dynamic"})(rows, "simulated")
        for trace in ("A", "B", "C")
    ]
    shares = sorted(100 * (gain - 1) for gain in gains if gain is not None)
    return f"{shares[0]:.1f} to {shares[-1]:.1f}%"


BASE_30B = {"setup": "30B (2, 4, 8)", "system": "zb", "delay_ms": 0.0}


def measured_30b() -> str:
    """Iterations of the 30B mesh without delay by the clock, in ms."""
    return " and ".join(f"{ms:.0f}" for ms in find(rows_of("pipemorph/table2-threads"), **BASE_30B)["measured_ms"])


def late_probe_ms() -> float:
    """Of the probes after the link became late, which are most of them."""
    _, moves = rows_of("pipemorph/moved-lab")
    return float(median(moves["probes_ms"]))


def probes_with_one_more() -> str:
    """Their share of the time with the probe whose answer moved the nodes, taken to be as long as the others."""
    _, moves = rows_of("pipemorph/moved-lab")
    probes = sum(moves["probes_ms"]) + late_probe_ms()
    return f"{probes / (probes + sum(moves['steps_ms'])):.1%}"


NUMBERS: Mapping[str, Callable[[], str]] = {
    "ours over clairvoyant": partial(over_clairvoyant, "ours"),
    "ours, host over clairvoyant": partial(over_clairvoyant, "ours, host"),
    "dynamic over ours": dynamic_over_ours,
    "30B by the clock": measured_30b,
    "30B simulated": lambda: f"{simulated(find(rows_of('pipemorph/table2-simulate'), **BASE_30B)):.0f}",
    "a late probe": lambda: f"{late_probe_ms():.0f}",
    "probes with one more": probes_with_one_more,
}
"""What stands for the names in braces in `pipemorph.toml`."""

PAPER = read_paper(
    "pipemorph",
    CLAIMS,
    {"Figure 6": _part("figure9", "blocked"), "Figure 9": _part("figure9", "interfered")},
    NUMBERS,
)
