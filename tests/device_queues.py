"""A device that runs what it is given later, made of nothing: for what a GPU's queue asks of the runtime.

Work is done at once, as a CPU does it; but a mark counts as passed only when somebody waits for it, or a thread lets
the device go on. So whoever takes an op for ended because its function has returned is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from penstock.runtime.execute.launched_ops import WatchedMarks
from penstock.runtime.tensors.message import Payload


class LateMark:
    """A mark, by its number in the queue: so many milliseconds after the first one is it passed."""

    def __init__(self, queue: LateQueue, number: int) -> None:
        self.number = number
        self._queue = queue

    def query(self) -> bool:
        self._queue.require_sound()
        return self.number < self._queue.num_passed

    def synchronize(self) -> None:
        self._queue.pass_to(self.number)

    def elapsed_time(self, later: LateMark) -> float:
        assert max(self.number, later.number) < self._queue.num_passed, "read before the device has come there"
        return float(later.number - self.number)


class LateQueue(WatchedMarks):
    """Args:
    watches: whether the thread that waits for marks lets the device go on; else whoever waits for one does.
    """

    def __init__(self, watches: bool = False) -> None:
        super().__init__()
        self.num_marks = self.num_passed = self.num_beside = 0
        self.fails = False
        self._watches = watches
        self._lock = threading.Lock()

    def mark(self) -> LateMark:
        self.num_marks += 1
        return LateMark(self, self.num_marks - 1)

    def pass_to(self, number: int) -> None:
        with self._lock:
            self.require_sound()
            self.num_passed = max(self.num_passed, number + 1)

    def require_sound(self) -> None:
        if self.fails:
            raise RuntimeError("device-side assert triggered")

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        self.num_beside += 1
        return nullcontext()

    def waiting(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def watch(self, mark: Any, then: Callable[[], None]) -> None:
        if self._watches:
            super().watch(mark, then)
