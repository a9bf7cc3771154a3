"""Simulated against measured iteration times, over all measured figures: reads the raw results.

    python -m experiments.pipemorph.table

The error is how far, in either direction, a measured iteration was from the simulated one of the same configuration
under the same conditions at that time. Target: a median of at most 5%.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

from experiments.common.command import options
from experiments.common.results import Row, table
from experiments.pipemorph import RESULTS

TARGET = 0.05


def measured_files(folder: Path) -> dict[str, list[Row]]:
    """The rows of all measured results, by figure and backend."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in value["rows"] if row.get("measured_ms")]
        if rows:
            found[f"{value['figure']}, {value['backend']}"] = rows
    return found


def errors(rows: Sequence[Row]) -> list[float]:
    """Of each iteration, `measured / simulated - 1`."""
    return [
        real / ideal - 1 for row in rows for real, ideal in zip(row["measured_ms"], row["simulated_ms"], strict=True)
    ]


def lines(found: dict[str, list[Row]]) -> Iterator[str]:
    """A line for each figure, and one for all."""
    body = [[name, *_cells(rows)] for name, rows in found.items()]
    body.append(["all", *_cells([row for rows in found.values() for row in rows])])
    yield from table(["", "cases", "iterations", "median error", "90% below", "worst", "mean, signed"], body)
    yield f"target: median error at most {TARGET:.0%}"


def _cells(rows: Sequence[Row]) -> list[str]:
    signed = errors(rows)
    sizes = sorted(map(abs, signed))
    most = quantiles(sizes, n=10)[-1] if len(sizes) > 1 else sizes[0]
    return [
        str(len(rows)),
        str(len(sizes)),
        f"{median(sizes):.2%}",
        f"{most:.1%}",
        f"{sizes[-1]:.1%}",
        f"{sum(signed) / len(signed):+.2%}",
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    found = measured_files(parser.parse_args().results)
    if not found:
        raise SystemExit("nothing was measured yet: run figures with --backend threads or processes")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
