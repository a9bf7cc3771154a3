"""Reports a rank's uncaught exception to the process that launched it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from penstock.runtime.launch.message import details, one_line
from penstock.runtime.launch.report import CONTEXT, FailureKind, FailureReport, context_of

__all__ = ["FolderDesk", "Reporter", "StoreDesk", "report_failure"]

KEY = "penstock/failure"
ANSWER = 1.0  # seconds that the store may take to answer
LINGER = 1.0  # seconds a failed rank may take to run its exit handlers


class Desk(Protocol):
    """Where reports go."""

    def take(self, report: FailureReport) -> None:
        """Takes a report; the last one of a rank counts."""


class FolderDesk:
    """Under our launcher: a file for the parent, and not a word here."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def take(self, report: FailureReport) -> None:
        report.save(self._folder)


class StoreDesk:
    """Under torchrun: the first failed rank leaves its report in the store and prints it, the others a line.

    `patience` is how long a rank that merely lost a peer looks for the cause. A store that can't be reached answers
    neither yes nor no: it has a second more, and then a rank speaks for itself.
    """

    def __init__(self, store: dist.Store, patience: float = 2.0) -> None:
        self._store, self._patience = store, patience

    def take(self, report: FailureReport) -> None:
        if not report.final or report.kind is FailureKind.INTERRUPT:
            return
        found: list[FailureReport | None] = []
        asking = threading.Thread(target=self._look, args=(report, found), daemon=True)
        asking.start()
        asking.join(self._patience + ANSWER)
        root = found[0] if found else None
        if root is None or root == report:
            shown = [] if report.kind is FailureKind.LOST else details(report)
            print("\n".join([f"penstock: {one_line(report)}", *shown]), file=sys.stderr, flush=True)
        else:
            print(f"penstock: rank {report.rank} ended because rank {root.rank} failed", file=sys.stderr, flush=True)

    def _look(self, report: FailureReport, found: list[FailureReport | None]) -> None:
        with contextlib.suppress(RuntimeError, ValueError, TypeError):  # the store may be gone too
            found.append(self._root(report))

    def _root(self, report: FailureReport) -> FailureReport | None:
        if report.kind is not FailureKind.LOST:
            return FailureReport.parse(self._store.compare_set(KEY, "", report.text()).decode())
        end = time.monotonic() + self._patience
        while not self._store.check([KEY]):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        return FailureReport.parse(self._store.get(KEY).decode())


class Reporter:
    """`sys.excepthook` of a rank; a process that the rank forks keeps Python's own.

    A failed rank leaves as soon as the exit handlers registered after this have run: the interpreter's teardown
    takes longer, and the other ranks learn of the failure only when it is over.
    """

    def __init__(self, rank: int, desk: Desk) -> None:
        self.rank, self.desk = rank, desk
        self.failed = False
        self._process = os.getpid()
        atexit.register(self._leave)

    def note(self, error: BaseException) -> None:
        """Reports an exception that may still be caught."""
        self.desk.take(FailureReport.of(error, self.rank, final=False))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            sys.__excepthook__(kind, error, trace)
            return
        self.failed = True
        self.desk.take(FailureReport.of(error, self.rank, final=True))
        _flush()
        timer = threading.Timer(LINGER, os._exit, [1])
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        if self.failed and os.getpid() == self._process:
            _flush()
            os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def report_failure(error: BaseException, context: str | None = None) -> None:
    """Says where an exception happened ("step 17 in F3 of stage 2") before it goes on its way.

    Call it in an `except` that raises on; the innermost call counts. If the process ends by the exception, or with
    an exit code after it, the launcher's message has it; otherwise nothing happens.
    """
    if context and context_of(error) is None:
        setattr(error, CONTEXT, context)
    if isinstance(sys.excepthook, Reporter):
        sys.excepthook.note(error)
