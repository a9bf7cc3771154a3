"""What the parent hands to each child, beside torch's own RANK, WORLD_SIZE and the rest.

What a rank writes to stderr before it can report: held in a file, so that a broken import is printed only once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["LaunchEnvironment", "held_path", "held_text", "let_through"]

VARIABLE = "PENSTOCK_LAUNCH"


@dataclass(frozen=True)
class LaunchEnvironment:
    """The folder for reports, and descriptors: the lifeline's reading end, the real stderr, on rank 0 the store's
    listening socket."""

    reports: str
    lifeline: int
    stderr: int
    store: int | None

    def variables(self) -> dict[str, str]:
        """As environment variables for the child."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LaunchEnvironment | None:
        """What this process was handed, None if no parent of ours started it."""
        text = environment.get(VARIABLE)
        return cls(**json.loads(text)) if text else None


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
