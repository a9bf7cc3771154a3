"""Raw results as JSON beside the scripts, and what all figures' commands share.

results/figure15-simulate.json    of `figure15.py`
results/figure15-threads.json     of `figure15.py --backend threads`
results/figure15.svg              its chart, of the last run
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from backends import BACKENDS, Backend, Row

RESULTS = Path(__file__).with_name("results")


def command(
    figure: str,
    about: str | None,
    rows: Callable[[Backend], Iterable[Row]],
    lines: Callable[[Sequence[Row]], Iterator[str]],
    chart: Callable[[Sequence[Row]], object] | None = None,
    backends: Sequence[str] = BACKENDS,
    jobs: int = 6,
    stretch: float = 3.0,
) -> None:
    """Runs a figure from the command line: carries out its cases, saves, prints and draws them."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=backends, default=backends[0])
    parser.add_argument("--stretch", type=float, default=stretch, help="seconds of the clock to one of an op")
    parser.add_argument("--steps", type=int, default=2, help="iterations of each measured case")
    parser.add_argument("--jobs", type=int, default=jobs, help="measured cases at once")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw results and the chart")
    given = parser.parse_args()
    backend = Backend(given.backend, given.stretch, given.steps, 1 if given.backend == "processes" else given.jobs)
    began = time.perf_counter()
    found = list(rows(backend))
    save(given.out, figure, backend, found, time.perf_counter() - began)
    print("\n".join(lines(found)))
    if chart is not None:
        path = given.out / f"{figure}.svg"
        path.write_text(str(chart(found)), encoding="utf-8")
        print(f"chart: {path}")


def save(folder: Path, figure: str, backend: Backend, rows: Sequence[Row], seconds: float) -> None:
    """Writes the raw results of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    value: dict[str, Any] = {"figure": figure, "backend": backend.name, "seconds": round(seconds, 1)}
    if backend.name != "simulate":
        value |= {"stretch": backend.stretch, "jobs": backend.jobs}
    path = folder / f"{figure}-{backend.name}.json"
    head = json.dumps(value)[:-1]
    body = ",\n ".join(json.dumps(_rounded(row)) for row in rows)
    path.write_text(f'{head}, "rows": [\n {body}\n]}}\n', encoding="utf-8")


def _rounded(value: Any) -> Any:
    """The same with fewer digits: microseconds of milliseconds are enough."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def simulated(row: Row) -> float:
    """The simulated time of an iteration (ms)."""
    return fmean(row["simulated_ms"])


def measured(row: Row) -> float | None:
    """The measured time of an iteration (ms), None where nothing was measured."""
    return median(row["measured_ms"]) if row["measured_ms"] else None


def pair(row: Row) -> str:
    """`simulated/measured` in ms; the first alone where nothing was measured."""
    found = measured(row)
    return f"{simulated(row):.0f}" + ("" if found is None else f"/{found:.0f}")


def times(row: Row, base: Row) -> str:
    """The same as multiples of another row, simulated of simulated and measured of measured."""
    found, unit = measured(row), measured(base)
    text = f"{simulated(row) / simulated(base):.2f}"
    return text if found is None or unit is None else f"{text}/{found / unit:.2f}"


def best_known(row: Row) -> float:
    """What was measured where something was, else what was simulated (ms)."""
    found = measured(row)
    return simulated(row) if found is None else found


def find(rows: Sequence[Row], **keys: Any) -> Row:
    """The one row with these keys."""
    (found,) = [row for row in rows if all(row.get(name) == value for name, value in keys.items())]
    return found


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the first left-aligned, the others right."""
    cells = [list(head), *map(list, body)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        parts = [
            text.ljust(width) if not at else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(parts).rstrip()
