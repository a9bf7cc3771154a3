"""How long tests wait for what should come soon, and how they say what they waited for in vain.

    wait_until(lambda: not alive(pids), lambda: f"ranks {alive(pids)} still run")

No test is about this time: it is longer than the same takes on a machine ten times slower than most, and shorter than
a test may take. Only a test of a deadline has a short one, which begins once all that is slow has been done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from penstock.control.steps import CLOSELY, REST
from penstock.formats.files import replaced

PATIENCE = 100.0
"""Seconds."""


def wait_until(
    holds: Callable[[], object], seen: Callable[[], object], seconds: float = PATIENCE, pause: float = 0.02
) -> None:
    """Returns when `holds()` is true; where it does not become so in time, an AssertionError says what was `seen`."""
    end = time.monotonic() + seconds
    while not holds():
        # Looked at once more: this process may have stood still since.
        assert time.monotonic() < end or holds(), f"after {seconds:g} s of waiting: {seen()}"
        time.sleep(pause)


def write_at_once(path: Path, text: str) -> None:
    """Writes a file that another process waits for: it appears with its text, and is never seen empty."""
    with replaced(path) as beside:
        beside.write_text(text)


def keep_up(folder: Path, step: int) -> None:
    """Waits until a run's controller has heard of all but the last steps, by its records; no longer than usual. Those
    are three, and besides the steps since one was reported in full.

    Its process starts later than a busy machine trains: a run of so many steps would end before anything is decided.
    """
    records = folder / "iterations.jsonl"

    def heard() -> bool:
        least = step - 3 if step <= CLOSELY else step - 3 - REST
        return least <= 0 or (records.exists() and records.read_bytes().count(b"\n") >= least)

    with contextlib.suppress(AssertionError):
        wait_until(heard, lambda: "", seconds=PATIENCE / 2, pause=0.005)


def shorten(owner: object, seconds: float) -> None:
    """Gives all of ours that `owner` holds and that waits this deadline in place of `PATIENCE`.

    So a test of a deadline makes what has one, and runs it once, however long that takes.
    """
    seen: set[int] = set()
    left = [owner]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif type(one).__module__.partition(".")[0] == "penstock":
            for name, value in list(getattr(one, "__dict__", {}).items()):
                if name in ("timeout", "_timeout") and value == PATIENCE:
                    object.__setattr__(one, name, seconds)
                left.append(value)
