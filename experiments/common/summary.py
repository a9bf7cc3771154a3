"""The one file that a benchmark keeps of a run: its record and its figures, a row a line, short enough to be read.

{
 "commit": "0123abc...",
 "command": "python benchmarks/limits/run.py 8x32 warm",
 "rows": [
  {"size": [8, 32], "seconds": 0.98},
  {"size": [16, 64], "seconds": 1.01}
 ]
}

Numbers of every repeat stay out of it: a script puts medians, means and extremes there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_LINES = 100
DIGITS = 9
"""Significant digits of a number that is not whole."""


def save_summary(path: Path, found: Mapping[str, Any]) -> None:
    """Writes a summary, whole or not at all.

    Raises:
        ValueError: it would have more than 100 lines.
    """
    text = summary_text(found)
    num_lines = text.count("\n")
    if num_lines > MOST_LINES:
        longest = max(found, key=lambda name: len(json.dumps(found[name])))
        raise ValueError(
            f"the summary {path} would have {num_lines} lines and may have {MOST_LINES}; put means, medians and "
            f"extremes of {longest!r} there in place of its {len(found[longest])} rows"
        )
    beside = path.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def summary_text(found: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and one for each row of a list or mapping of rows."""
    lines = [f" {json.dumps(name)}: {_rows(with_few_digits(value))}" for name, value in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(value: Any) -> str:
    """A value on one line, or each of its rows on one."""
    if isinstance(value, Mapping) and any(isinstance(each, Mapping | list) for each in value.values()):
        rows = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
        return "{\n  " + ",\n  ".join(rows) + "\n }"
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        return "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n ]"
    return json.dumps(value)


def with_few_digits(value: Any) -> Any:
    """The same with `DIGITS` digits; None for what is no finite number."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): with_few_digits(each) for name, each in value.items()}
    return [with_few_digits(each) for each in value] if isinstance(value, list | tuple) else value
