"""Failures in words for a person."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.runtime.launch.report import FailureReport

__all__ = ["details", "one_line", "ranks"]

FULL = "PENSTOCK_TRACEBACK"


def one_line(report: FailureReport) -> str:
    """`rank 2 failed at step 17 in F3 of stage 2: ValueError: what it said`."""
    where = f" at {report.context}" if report.context else ""
    return f"rank {report.rank} failed{where}: {report.what}"


def details(report: FailureReport) -> list[str]:
    """The last lines of the user's own code, or all of the traceback where PENSTOCK_TRACEBACK=1 asks for it."""
    if os.environ.get(FULL, "0") not in ("", "0"):
        return report.traceback.splitlines()
    return [*report.lines, f"  ({FULL}=1 shows the whole traceback)"] if report.lines else []


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 3`, or `ranks 0 to 62` for a long unbroken row."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 4 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers))}"
