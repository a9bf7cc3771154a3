"""Raw results as JSON beside the scripts, a row a line, and the lines of a table.

results/figure12.json     what `figure12.py` found
results/figure12.svg      its chart
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.draw.chart import Figure, save_chart

RESULTS = Path(__file__).with_name("results")

Row = dict[str, Any]


def save(folder: Path, name: str, rows: Sequence[Row], **facts: Any) -> None:
    """Writes the raw results of a run and what they were found with; whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    head = json.dumps(_rounded({"name": name, **facts}))[:-1]
    body = ",\n ".join(json.dumps(_rounded(row)) for row in rows)
    beside = folder / f"{name}.part"
    beside.write_text(f'{head}, "rows": [\n {body}\n]}}\n', encoding="utf-8")
    beside.replace(folder / f"{name}.json")


def load(folder: Path, name: str) -> list[Row]:
    """The rows that `save` wrote. Exits with what to run first where there are none."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{folder} has no {name}.json: run {name}.py first")
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def known(folder: Path, name: str, resume: bool) -> list[Row]:
    """What an earlier run has found, where it is to be gone on with; else nothing."""
    return load(folder, name) if resume and (folder / f"{name}.json").exists() else []


def find(rows: Sequence[Row], **keys: Any) -> Row:
    """The one row with these keys."""
    (found,) = [row for row in rows if all(row.get(name) == value for name, value in keys.items())]
    return found


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the first left-aligned, the others right."""
    cells = [list(head), *map(list, body)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip()


def draw(folder: Path, name: str, figure: Figure) -> None:
    """Saves a chart beside the results and says where."""
    path = folder / f"{name}.svg"
    save_chart(figure, path)
    print(f"chart: {path}")


def _rounded(value: Any) -> Any:
    """The same with fewer digits: microseconds of milliseconds are enough."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
