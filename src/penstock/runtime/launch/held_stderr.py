"""What a rank writes to stderr before it can report: held in a file, so that a broken import is printed only once."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

__all__ = ["held_path", "held_text", "let_through"]


def held_path(reports: str, rank: int) -> Path:
    """The file that is a rank's stderr until `let_through`."""
    return Path(reports, f"rank-{rank}.stderr")


def held_text(reports: str, rank: int) -> str:
    """What is still held of a rank that has ended."""
    with contextlib.suppress(OSError):
        return held_path(reports, rank).read_text(errors="replace")
    return ""


def let_through(reports: str, rank: int, stderr: int) -> None:
    """Makes descriptor `stderr` this rank's stderr again, and writes what was held to it."""
    with contextlib.suppress(OSError):  # not our descriptor: started by something between us and the parent
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        text = held_path(reports, rank).read_bytes()
        held_path(reports, rank).unlink()
        os.write(2, text)
