"""What all figures' commands share.

results/figure15-simulate.json    of `figure15.py`
results/figure15-threads.json     of `figure15.py --backend threads`
results/figure15.svg              its chart, of the last run

Where an option of one figure is not as usual its name is in those of the files: figure22-minutes60-simulate.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.common import results
from experiments.common.command import options
from experiments.common.results import Row
from experiments.pipemorph import RESULTS
from experiments.pipemorph.backends import BACKENDS, Backend

LONG = 50
"""Iterations of a simulated run from which on only their mean is kept."""


def command(
    figure: str,
    about: str | None,
    rows: Callable[..., Iterable[Row]],
    lines: Callable[[Sequence[Row]], Iterator[str]],
    chart: Callable[[Sequence[Row]], object] | None = None,
    backends: Sequence[str] = BACKENDS,
    jobs: int = 6,
    stretch: float = 3.0,
    seeds: Sequence[int] = (),
    more: Mapping[str, tuple[float, str]] | None = None,
) -> None:
    """Runs a figure from the command line: carries out its cases, saves, prints and draws them.

    Args:
        more: further options, each with what it is where it is not given, and its help. `rows` takes them by name.
    """
    parser = options(about, RESULTS)
    parser.add_argument("--backend", choices=backends, default=backends[0])
    parser.add_argument("--stretch", type=float, default=stretch, help="seconds of the clock to one of an op")
    parser.add_argument("--steps", type=int, default=2, help="iterations of each measured case")
    parser.add_argument("--jobs", type=int, default=jobs, help="measured cases at once")
    parser.add_argument(
        "--only", default="", help="runs systems alone whose names have this, beside the rows there are"
    )
    for name, (usual, said) in (more or {}).items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual, help=f"{said} (default: {usual})")
    given = parser.parse_args()
    for name, (usual, _) in (more or {}).items():
        value = getattr(given, name)
        figure += f"-{name}{value:g}" if value != usual else ""
    jobs = 1 if given.backend == "processes" else given.jobs
    backend = Backend(given.backend, given.stretch, given.steps, jobs, given.only)
    began = time.perf_counter()
    found = list(rows(backend, **{name: getattr(given, name) for name in more or {}}))
    if given.only:
        made = iter(found)
        there = results.known(given.out, f"{figure}-{backend.name}")
        found = [next(made) if backend.runs(row) else row for row in there]
    save(given.out, figure, backend, found, time.perf_counter() - began, seeds)
    print("\n".join(lines(found)))
    if chart is not None:
        path = given.out / f"{figure}.svg"
        path.write_text(str(chart(found)), encoding="utf-8")
        print(f"chart: {path}")


def save(
    folder: Path, figure: str, backend: Backend, rows: Sequence[Row], seconds: float, seeds: Sequence[int] = ()
) -> None:
    """Writes the raw results of a run."""
    facts: dict[str, Any] = {"figure": figure, "backend": backend.name, "seconds": round(seconds, 1)}
    # The iterations of a long simulated run are many; a measured one's are compared one by one.
    long = backend.name == "simulate" and any(len(row["simulated_ms"]) > LONG for row in rows)
    raw = {"simulated_ms": lambda ms: [fmean(ms)], "starts": None, "numbers": None} if long else None
    if backend.only:
        facts["earlier"] = results.runs(folder, f"{figure}-{backend.name}")
    if backend.name != "simulate":
        facts |= {"stretch": backend.stretch, "jobs": backend.jobs}
    results.save(folder, f"{figure}-{backend.name}", rows, seeds=seeds, raw=raw, **facts)
