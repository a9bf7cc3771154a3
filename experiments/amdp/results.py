"""Raw results as JSON beside the scripts, their charts, and the lines of a table.

results/figure7.json     what `figure7.py` found, a row a line
results/figure7.svg      its chart
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")

Row = dict[str, Any]
"""Of one case: its keys and what was found."""


def save(folder: Path, name: str, rows: Sequence[Row], **facts: Any) -> Path:
    """Writes the raw results of a run and what they were found with; whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    head = json.dumps({"name": name, **_rounded(facts)})[:-1]
    body = ",\n ".join(json.dumps(_rounded(row)) for row in rows)
    beside = path.with_suffix(".part")
    beside.write_text(f'{head}, "rows": [\n {body}\n]}}\n', encoding="utf-8")
    beside.replace(path)
    return path


def load(folder: Path, name: str) -> dict[str, Any]:
    """What `save` wrote, its rows under "rows"; no rows where there is no such file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {"name": name, "rows": []}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


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


def shown(loss: float | None) -> str:
    """A loss in a table; None is that of a run that diverged."""
    return "diverged" if loss is None else f"{loss:.4f}"


def _rounded(value: Any) -> Any:
    """The same with fewer digits, as those further on say nothing; None for what is no number."""
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
