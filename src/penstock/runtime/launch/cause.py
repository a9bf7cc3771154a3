"""Which of several ends was the first, and what to say of it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.launch.message import details, one_line, ranks
from penstock.runtime.launch.report import FailureKind, FailureReport

__all__ = ["End", "exit_code", "explain", "root_cause"]

HEAD_START = 0.5  # seconds by which a kill is older than the moment the parent saw it, at most
HINTS = {
    signal.SIGKILL: "; out of memory is the usual cause (the kernel's log, dmesg, tells): use smaller microbatches",
    signal.SIGTERM: " from outside",
    signal.SIGABRT: "; what native code wrote above tells why",
    signal.SIGSEGV: " in native code",
    signal.SIGBUS: "; a full /dev/shm or a truncated mapped file is the usual cause",
}


@dataclass(frozen=True)
class End:
    """How one rank ended: `code` as `Popen` has it (minus the signal), and whether the parent had asked it to."""

    rank: int
    code: int
    time: float
    asked: bool
    report: FailureReport | None
    held: str = ""  # what it wrote to stderr before it could report

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.asked

    @property
    def said(self) -> FailureReport | None:
        """The report, if the process ended by it and not by a kill on the way."""
        return self.report if self.report and (self.report.final or self.code > 0) else None

    @property
    def secondary(self) -> bool:
        """Ended by the parent, or merely by the loss of a peer."""
        return self.said.kind is FailureKind.LOST if self.said else self.asked

    @property
    def since(self) -> float:
        if self.said:
            return self.said.time
        return self.time - HEAD_START if self.code < 0 else self.time


def root_cause(ends: Sequence[End]) -> End | None:
    """The earliest failure that was not the loss of a peer; else the earliest; None when nothing failed."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (end.secondary, end.said is None and end.asked, end.since), default=None)


def explain(root: End, ends: Sequence[End]) -> str:
    """The one message: the cause, where in the user's code, and what became of the others."""
    lines = [f"penstock: {_cause(root)}"]
    if root.said and root.said.kind is not FailureKind.INTERRUPT:
        lines += details(root.said)
    lines += root.held.splitlines()
    others = [end for end in ends if end is not root and end.failed]
    stuck = [end.rank for end in others if end.asked and not end.said]
    followed = [end.rank for end in others if end.rank not in stuck]
    tail = []
    if followed:
        tail.append(f"{ranks(followed)} ended because of it")
    if stuck:
        tail.append(f"{ranks(stuck)} did not end and had to be stopped")
    return "\n".join([*lines, "; ".join(tail)]).strip()


def exit_code(root: End) -> int:
    """The parent's exit code: the rank's own, or the shell's 128 + signal."""
    if root.said and root.said.kind is FailureKind.INTERRUPT:
        return 128 + signal.SIGINT
    if root.asked:
        return 1
    return root.code if root.code > 0 else 128 - root.code


def _cause(end: End) -> str:
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
