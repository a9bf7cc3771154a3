"""What one rank says of its own failure."""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import torch

from penstock.runtime.launch.peer_loss import LossKind, loss_of

__all__ = ["CONTEXT", "FailureKind", "FailureReport", "context_of"]

FRAMES = 3
CONTEXT = "__penstock_context__"  # the attribute of an exception that says where it happened
NOT_THE_USERS = tuple(
    str(Path(folder)) + os.sep
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],  # penstock
        sysconfig.get_path("stdlib"),
    )
)


class FailureKind(StrEnum):
    """Why a rank ended, as far as it can tell itself."""

    ERROR = "error"
    LATE = "late"
    LOST = "lost"  # secondary: merely the loss of a peer
    INTERRUPT = "interrupt"


@dataclass(frozen=True)
class FailureReport:
    """An exception, in words that survive the process.

    `final` once the process is ending because of it; until then the user's code may still catch it.
    """

    rank: int
    kind: FailureKind
    type: str
    message: str
    context: str | None
    lines: list[str]
    traceback: str
    time: float
    final: bool

    @classmethod
    def of(cls, error: BaseException, rank: int, *, final: bool) -> FailureReport:
        """The report of an exception; `lines` are the last frames of the user's own code."""
        return cls(
            rank=rank,
            kind=_kind(error),
            type=type(error).__name__,
            message="\n".join([str(error), *getattr(error, "__notes__", [])]).strip(),
            context=context_of(error),
            lines=_user_lines(error),
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
            final=final,
        )

    @property
    def what(self) -> str:
        """`ValueError: what it said`."""
        return f"{self.type}: {self.message}" if self.message else self.type

    def save(self, folder: str) -> None:
        """Writes the report, whole or not at all; a full disk costs the report and nothing more."""
        path = Path(folder, f"rank-{self.rank}.json")
        with contextlib.suppress(OSError):
            path.with_suffix(".writing").write_text(self.text())
            os.replace(path.with_suffix(".writing"), path)

    @classmethod
    def load(cls, folder: str, rank: int) -> FailureReport | None:
        """The report a rank left, if it did."""
        try:
            return cls.parse(Path(folder, f"rank-{rank}.json").read_text())
        except (OSError, ValueError, TypeError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> FailureReport:
        value = json.loads(text)
        return cls(**value | {"kind": FailureKind(value["kind"])})


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it came from, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def context_of(error: BaseException) -> str | None:
    """Where an exception, or one it came from, was said to have happened."""
    return next((getattr(each, CONTEXT) for each in chain(error) if hasattr(each, CONTEXT)), None)


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, KeyboardInterrupt):
        return FailureKind.INTERRUPT
    losses = {loss_of(each) for each in chain(error)}
    if LossKind.LOST in losses:
        return FailureKind.LOST
    return FailureKind.LATE if LossKind.LATE in losses else FailureKind.ERROR


def _user_lines(error: BaseException) -> list[str]:
    """The last frames outside torch, Penstock and the standard library, and the cause; our own errors need none."""
    if type(error).__module__.partition(".")[0] == "penstock":
        return []
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*NOT_THE_USERS, "<frozen"))]
    lines = [line for text in traceback.format_list((users or list(frames))[-FRAMES:]) for line in text.splitlines()]
    lines = [line for line in lines if line.strip(" ^~")]
    if error.__cause__ is not None:
        lines.append(f"  caused by {type(error.__cause__).__name__}: {error.__cause__}")
    return lines
