"""How verbs write to stdout: one JSON object, or text with colour where the terminal shows it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object, strict (no NaN)."""
    print(json.dumps(value, allow_nan=False))


def in_colour() -> bool:
    """Whether stdout shows colour: a terminal does, unless NO_COLOR is set; FORCE_COLOR overrides both."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plural(count: int, noun: str, several: str | None = None) -> str:
    """`1 rank`, `2 ranks`, `3 microbatches`."""
    return f"{count} {noun if count == 1 else several or noun + 's'}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(lines)


def show_progress(said: str) -> None:
    """Shows how far the work is, in a line of a terminal that the next call overwrites; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r{said}\x1b[K", end="\r", file=sys.stderr, flush=True)
