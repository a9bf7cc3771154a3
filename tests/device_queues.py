"""Devices that run what they are given later, made of nothing: for what a GPU's queue asks of the runtime.

`LateQueue`: work is done at once, as a CPU does it; but a mark counts as passed only when somebody waits for it, or a
thread lets the device go on. So whoever takes an op for ended because its function has returned is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.execute.launched_ops import DeviceQueue, WaitingThread
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport import choose, nccl


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


class LateQueue(DeviceQueue):
    """Args:
    watches: whether the thread that waits for marks lets the device go on; else whoever waits for one does.
    """

    def __init__(self, watches: bool = False) -> None:
        self._thread = WaitingThread("late-marks")
        self.num_marks = self.num_passed = self.num_beside = 0
        self.fails = False
        self._watches = watches
        self._lock = threading.Lock()

    def mark(self, sleeps: bool = True) -> LateMark:
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


class LateLines:
    """What NCCL's lines ask of a device and of torch.distributed, over gloo: a wait for a message returns at once, as
    NCCL's does for the host, and only a look at it tells whether it has come.

    Whoever posts a receive elsewhere than on its stream, or into a buffer that is still in use, is found out; and so
    is who takes a message of a line that was aborted for one that has come: it counts as completed, with no error and
    with nonsense in it, as NCCL's does.

    Args:
        fails_at: the receive whose line fails by itself, as where a connection is reset; None for none.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self._here = threading.local()
        self._in_use: set[int] = set()
        self._messages: list[LateMessage] = []
        self.fails_at = fails_at
        self.num_waits = self.num_looks = self.num_receives = self.num_aborts = 0

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
        return self._under_way(LateMessage(self, dist.isend(buffer, **ends), ends["group"]))

    def irecv(self, buffer: Tensor, **ends: Any) -> LateMessage:
        assert self._here.stream == "receives", "posted where it waits for what computes"
        assert buffer.data_ptr() not in self._in_use, "posted into a buffer that is still read"
        self.num_receives += 1
        fails = self.num_receives == self.fails_at
        work = None if fails else dist.irecv(buffer, **ends)
        return self._under_way(LateMessage(self, work, ends["group"], buffer))

    def _under_way(self, message: LateMessage) -> LateMessage:
        self._messages.append(message)
        return message

    def abort(self, group: Any) -> None:
        """What a group of the lines does in the place of torch's own."""
        self.num_aborts += 1
        for message in self._messages:
            if message.group is group:
                message.abort()


class LateMessage:
    """A message under way.

    Args:
        work: of gloo's; None where the line fails.
        into: the buffer of a receive.
    """

    def __init__(self, lines: LateLines, work: Any, group: Any, into: Tensor | None = None) -> None:
        self._lines, self._come, self.group, self._into = lines, threading.Event(), group, into
        self._error: BaseException | None = None
        if work is None:
            self._error = dist.DistBackendError("NCCL error: remote process exited or there was a network error")
            self._come.set()
        else:
            threading.Thread(target=self._wait_for, args=(work,), daemon=True).start()

    def abort(self) -> None:
        """It counts as completed."""
        if not self._come.is_set():
            if self._into is not None:
                self._into.fill_(119)
            self._come.set()

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


def lines_over_gloo(
    group: Any, channels: Sequence[Any], timeout: float, lines: LateLines | None = None
) -> nccl.DeviceLines:
    """The lines of NCCL, which go over gloo in this process from now on."""
    lines = LateLines() if lines is None else lines
    nccl.dist = lines  # type: ignore[assignment]
    return nccl.DeviceLines(group, channels, "gloo", timeout, torch.device("cpu"), lines)


def stand_in_for_nccl() -> list[LateLines]:
    """Lets transport "nccl" run in this process without a GPU: its lines go over gloo, as late as NCCL's. Returns the
    lines of each pipeline that is made from now on.
    """
    found: list[LateLines] = []

    def made(group: Any, timeout: float, wiring: Any, *_: Any) -> nccl.DeviceLines:
        found.append(LateLines())
        return lines_over_gloo(group, nccl.lines_of(wiring), timeout, found[-1])

    choose._lines = made
    return found
