"""Failures of ranks: what each reports of its own, which of several was the first, and how a person is told.

    exception --> FailureReport (loss_of: or is it another rank's fault?) --pipe--> server: RankExit of each
                                                                                         |
                                                           root_cause: the first --> explain: lines for a person

`loss_of` tells apart the words of gloo, NCCL and the store in one place: which exceptions are another rank's fault.
"""

from __future__ import annotations

import os
import signal
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from penstock.host_process import chain, limit_behind, text_of
from penstock.runtime.errors import DeadlineExceeded, PeerFailed, PeerLost

LATE = (
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "socket timeout",
)
LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "timeout caused pair closure",  # another wait on the same pair timed out before: the pair is gone
    "connection was likely closed",
    "broken pipe",
    "connection refused",
    "failed to recv, got 0 bytes",
    "ncclremoteerror",
    "remote process exited",
)


class FailureKind(StrEnum):
    """Why a rank ended, as far as it can tell itself."""

    ERROR = "error"
    LATE = "late"  # nothing came from a peer in time
    LOST = "lost"  # secondary: a peer is gone
    INTERRUPT = "interrupt"


def loss_of(error: BaseException) -> FailureKind | None:
    """What an exception of ours or of torch.distributed says of a peer; None when it is about this rank."""
    if isinstance(error, PeerLost | PeerFailed):
        return FailureKind.LOST
    if isinstance(error, DeadlineExceeded):
        return FailureKind.LATE
    if not isinstance(error, (RuntimeError, ConnectionError)):
        return None
    text = text_of(error).lower()
    if isinstance(error, ConnectionError) or any(words in text for words in LOST):
        return FailureKind.LOST
    return FailureKind.LATE if any(words in text for words in LATE) else None


FRAMES = 3
NOT_THE_USERS = tuple(
    str(Path(folder)) + os.sep
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],  # penstock
        sysconfig.get_path("stdlib"),
    )
)


@dataclass(frozen=True)
class FailureReport:
    """The exception by which a process ends, in words that survive it."""

    rank: int
    kind: FailureKind
    type: str
    message: str
    lines: list[str]
    traceback: str
    time: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureReport:
        """The report of an exception; `lines` are the last frames of the user's own code."""
        return cls(
            rank=rank,
            kind=_kind(error),
            type=type(error).__name__,
            message="\n".join(
                filter(None, [text_of(error), *map(str, getattr(error, "__notes__", [])), limit_behind(error)])
            ).strip(),
            lines=_user_lines(error),
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
        )

    @property
    def what(self) -> str:
        """`ValueError: what it said`."""
        return f"{self.type}: {self.message}" if self.message else self.type


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, KeyboardInterrupt):
        return FailureKind.INTERRUPT
    losses = {loss_of(each) for each in chain(error)}
    if FailureKind.LOST in losses:
        return FailureKind.LOST
    return FailureKind.LATE if FailureKind.LATE in losses else FailureKind.ERROR


def _user_lines(error: BaseException) -> list[str]:
    """The last frames outside torch, Penstock and the standard library, and the cause; our own errors need none."""
    if type(error).__module__.partition(".")[0] == "penstock":
        return []
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*NOT_THE_USERS, "<frozen"))]
    lines = [line for text in traceback.format_list((users or list(frames))[-FRAMES:]) for line in text.splitlines()]
    lines = [line for line in lines if line.strip(" ^~")]
    if error.__cause__ is not None:
        lines.append(f"  caused by {type(error.__cause__).__name__}: {text_of(error.__cause__)}")
    return lines


FULL = "PENSTOCK_TRACEBACK"


def one_line(report: FailureReport) -> str:
    """`rank 2 failed: ValueError: what it said`."""
    return f"rank {report.rank} failed: {report.what}"


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


HEAD_START = 0.5  # seconds by which a kill is older than the moment the parent saw it, at most
HINTS = {
    signal.SIGKILL: "; out of memory is the usual cause (the kernel's log, dmesg, tells): use smaller microbatches",
    signal.SIGTERM: " from outside",
    signal.SIGABRT: "; what native code wrote above tells why",
    signal.SIGSEGV: " in native code",
    signal.SIGBUS: "; a full /dev/shm or a truncated mapped file is the usual cause",
}


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: `code` as `Popen` has it (minus the signal), whether the parent had asked it to, and the
    exception by which it said that it ends.
    """

    rank: int
    code: int
    time: float
    asked: bool
    said: FailureReport | None

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.asked

    @property
    def secondary(self) -> bool:
        """Ended by the parent, or merely by the loss of a peer."""
        return self.said.kind is FailureKind.LOST if self.said else self.asked

    @property
    def since(self) -> float:
        if self.said:
            return self.said.time
        return self.time - HEAD_START if self.code < 0 else self.time


def root_cause(ends: Sequence[RankExit]) -> RankExit | None:
    """The earliest failure that was not the loss of a peer; else the earliest; None when nothing failed."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (end.secondary, end.said is None and end.asked, end.since), default=None)


def explain(root: RankExit, ends: Sequence[RankExit]) -> str:
    """The one message: the cause, where in the user's code, and what became of the others."""
    lines = [f"penstock: {_cause(root)}"]
    if root.said and root.said.kind is not FailureKind.INTERRUPT:
        lines += details(root.said)
    others = [end for end in ends if end is not root and end.failed]
    stuck = [end.rank for end in others if end.asked and not end.said]
    followed = [end.rank for end in others if end.rank not in stuck]
    tail = []
    if followed:
        tail.append(f"{ranks(followed)} ended because of it")
    if stuck:
        tail.append(f"{ranks(stuck)} did not end and had to be stopped")
    return "\n".join([*lines, "; ".join(tail)]).strip()


def exit_code(root: RankExit) -> int:
    """The parent's exit code: the rank's own, or the shell's 128 + signal."""
    if root.said and root.said.kind is FailureKind.INTERRUPT:
        return 128 + signal.SIGINT
    if root.asked:
        return 1
    return root.code if root.code > 0 else 128 - root.code


def _cause(end: RankExit) -> str:
    if end.said:
        return one_line(end.said)
    if end.asked:
        return f"rank {end.rank} did not end and had to be stopped"
    if end.code > 0:
        return f"rank {end.rank} ended with exit code {end.code} and reported no exception"
    try:
        number = signal.Signals(-end.code)
        name = number.name
    except ValueError:
        return f"rank {end.rank} was killed by signal {-end.code}"
    return f"rank {end.rank} was killed by {name}{HINTS.get(number, '')}"
