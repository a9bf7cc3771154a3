"""A device that runs what it is given later, made of nothing: for what a GPU's queue asks of the runtime.

Work is done at once, as a CPU does it; but a mark counts as passed only when somebody waits for it, or a thread lets
the device go on. So whoever takes an op for ended because its function has returned is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

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

    def mark(self, sleeps: bool = True) -> LateMark:
        self.num_marks += 1
        return LateMark(self, self.num_marks - 1)

    def lane(self, number: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, mark: LateMark) -> None:
        """What it is given has run already."""

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


class LateLines:
    """What NCCL's lines ask of a device and of torch.distributed, over gloo: a wait for a message returns at once, as
    NCCL's does for the host, and only a look at it tells whether it has come.

    Whoever posts a receive elsewhere than on its stream, or into a buffer that is still in use, is found out.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._in_use: set[int] = set()
        self.num_waits = self.num_looks = 0

    # The streams.

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = "computes"

    def receiving(self, free: Any) -> AbstractContextManager[Any]:
        if free is not None:
            self._in_use.discard(free)
        return self._on("receives")

    def ending(self) -> AbstractContextManager[Any]:
        return self._on("ends")

    def used(self, buffer: Tensor) -> int:
        self._in_use.add(buffer.data_ptr())
        return buffer.data_ptr()

    # torch.distributed.

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, buffer: Tensor, **ends: Any) -> LateMessage:
        return LateMessage(self, dist.isend(buffer, **ends))

    def irecv(self, buffer: Tensor, **ends: Any) -> LateMessage:
        assert self._here.stream == "receives", "posted where it waits for what computes"
        assert buffer.data_ptr() not in self._in_use, "posted into a buffer that is still read"
        return LateMessage(self, dist.irecv(buffer, **ends))


class LateMessage:
    """A message under way."""

    def __init__(self, lines: LateLines, work: Any) -> None:
        self._lines, self._come = lines, threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._wait_for, args=(work,), daemon=True).start()

    def _wait_for(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._error = error
        self._come.set()

    def is_completed(self) -> bool:
        self._lines.num_looks += 1
        return self._come.is_set()

    def wait(self) -> None:
        self._lines.num_waits += 1
        if self._error is not None:
            raise self._error
