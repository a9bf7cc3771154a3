"""Results as files: results/PART.json has the cells of a part by number, each with the record of its run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from experiments.common.record import record
from experiments.uneven import RESULTS


def read_cells(part: str) -> dict[str, Any]:
    """The cells of a part, by number; none where it was not run."""
    path = RESULTS / f"{part}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def add_cell(part: str, number: int, seeds: Sequence[int], found: dict[str, Any]) -> None:
    """Writes a cell beside those that are there.

    Args:
        seeds: the numbers of its draws or steps, which `protocol` makes seeds of.
    """
    cells = {**read_cells(part), str(number): {**record(), "seeds": list(seeds), **found}}
    lines = [f"{json.dumps(key)}: {json.dumps(cells[key], separators=(',', ':'))}" for key in sorted(cells, key=int)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{part}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
