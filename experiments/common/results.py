"""Raw results as JSON, a row a line, with the record of the run; their charts, and the lines of a table.

results/figure12.json     what a command found
results/figure12.svg      its chart
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.record import record
from penstock.draw.chart import Figure, save_chart

Row = dict[str, Any]
"""Of one case: its keys and what was found."""


def save(folder: Path, name: str, rows: Sequence[Row], *, seeds: Sequence[int] = (), **facts: Any) -> Path:
    """Writes the raw results of a run, its record and what else is known of it; whole or not at all.

    Args:
        seeds: of all that was drawn; none where nothing was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    head = json.dumps(rounded({"name": name, **facts, "record": record(seeds)}))[:-1]
    body = ",\n ".join(json.dumps(rounded(row)) for row in rows)
    beside = path.with_suffix(".part")
    beside.write_text(f'{head}, "rows": [\n {body}\n]}}\n', encoding="utf-8")
    beside.replace(path)
    return path


def facts(folder: Path, name: str) -> dict[str, Any]:
    """What a file says besides its rows; nothing where there is no such file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    del value["rows"]
    return value


def load(folder: Path, name: str) -> list[Row]:
    """The rows that `save` wrote. Exits with what to run first where there are none."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{folder} has no {path.name}: run {name.partition('-')[0]} first")
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def known(folder: Path, name: str, resume: bool = True) -> list[Row]:
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


def rounded(value: Any) -> Any:
    """The same with fewer digits, as those further on say nothing; None for what is no number."""
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value
