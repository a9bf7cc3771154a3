"""Failures a person can do something about: an exit code, a message, and the spot for `--json`."""

from __future__ import annotations

import errno
from dataclasses import asdict, dataclass
from typing import Any

from penstock.cost import CostError
from penstock.extras import what_to_install
from penstock.host_process import limit_behind
from penstock.schedule import ScheduleError

INVALID, MISUSE = 1, 2

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_OF = "what is written and for temporary files (in TMPDIR, where that is set)"
_NO_TEMPORARY = "No usable temporary directory"
"""How tempfile begins what it says."""

_MISUSE_RULES = ("name", "options", "dispatch", "file")
"""Rules broken by what the user typed. The others are broken by a schedule."""


@dataclass(frozen=True)
class Failure:
    """What went wrong; all but the first two are None where they do not apply."""

    exit_code: int
    message: str
    rule: str | None = None
    rank: int | None = None
    step: int | None = None
    op: str | None = None
    peer: str | None = None
    line: int | None = None
    column: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "exit_code"}


class Misuse(Exception):
    """A verb was called with values that do not go together; the message says which and what to do."""


def failure_of(error: Exception) -> Failure | None:
    """The failure an exception stands for, or None if it is a bug."""
    if isinstance(error, ScheduleError):
        code = MISUSE if error.rule in _MISUSE_RULES else INVALID
        op = None if error.op is None else str(error.op)
        spot = error.rank, error.step, op, error.peer, error.line, error.column
        return Failure(code, str(error), error.rule, *spot)
    if isinstance(error, CostError):
        return Failure(MISUSE, str(error), "costs")
    if isinstance(error, Misuse):
        return Failure(MISUSE, str(error), "usage")
    if type(error).__module__.startswith("penstock."):  # errors of layers that would be slow to import here
        return Failure(getattr(error, "exit_code", MISUSE), str(error), getattr(error, "rule", None))
    if (needed := what_to_install(error)) is not None:
        return Failure(MISUSE, needed, "install")
    if (limit := limit_behind(error)) is not None:
        return Failure(INVALID, f"{_first_line(error)}; {limit}", "limit")
    if isinstance(error, OSError) and error.filename is not None:
        return Failure(MISUSE, f"{error.filename}: {error.strerror or error}", "file")
    if isinstance(error, OSError) and error.errno in _FULL:
        return Failure(INVALID, f"a file could not be written: {error.strerror}; make room for {_FULL_OF}", "file")
    if isinstance(error, OSError) and str(error.strerror).startswith(_NO_TEMPORARY):
        return Failure(INVALID, f"{error.strerror}; set TMPDIR to a folder that can be written to", "file")
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
