"""How long tests wait for what should come soon, and how they say what they waited for in vain.

    wait_until(lambda: not alive(pids), lambda: f"ranks {alive(pids)} still run")

No test is about this time: it is longer than the same takes on a machine ten times slower than most, and shorter than
a test may take. Only a test of a deadline has a short one, which begins once all that is slow has been done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

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
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text)
    beside.replace(path)
