"""Asynchronous ops: what starts them and waits for their ends, beside the other ops of a rank.

    rank     start(G0) ---- F2 ---- F3 -- ended: G0 -- B0        what needs G0 waits for that
    stream      |~~~~~~ G0 ~~~~~~~|

A function starts an op and returns something to wait for. A thread of the rank's stream waits for one op after
another. It wakes the rank when an op has ended, if the rank has a thread of its own. Ranks that share one thread wait
for the stream when none of them can do anything else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.execute.launched_ops import DeviceQueue, WaitingThread
from penstock.runtime.tensors.message import Payload
from penstock.schedule import Op


class AsyncOpHandle(Protocol):
    """An op that was started.

    Attributes:
        timeout: seconds that a rank waits for its end when the rank can do nothing else.
        has_ended: whether `wait` returns at once.
    """

    timeout: float
    has_ended: bool

    def wait(self) -> tuple[int, int]:
        """Waits for its end; returns when it began and ended, in nanoseconds of the monotonic clock."""


Start = Callable[[Op, Sequence[Payload]], AsyncOpHandle]
"""Starts an asynchronous op, given what its incoming edges brought."""


EndedOp = tuple[int, int, int]
"""The number of an op that has ended, and when it began and ended (ns)."""


class AsyncStream:
    """The asynchronous ops of one rank in one step.

    Args:
        wake: ends the rank's wait for messages; None where the rank shares its thread with others.

    Attributes:
        num_open: ops started of which `ended` has not told.
    """

    def __init__(self, start: Start, wake: Callable[[], None] | None) -> None:
        self.num_open = 0
        self._start, self._wake = start, wake
        self._open: deque[tuple[Op, float]] = deque()
        self._ended: deque[EndedOp | BaseException] = deque()
        self._has_come = threading.Event()
        self._thread = WaitingThread("penstock-stream")
        self._has_failed = False

    def start(self, number: int, op: Op, received: Sequence[Payload]) -> None:
        """Starts an op."""
        started = self._start(op, received)
        wait = partial(self._wait, number, started)
        if started.has_ended and not self.num_open:
            wait()
        else:
            self._thread.put(wait)
        self._open.append((op, started.timeout))
        self.num_open += 1

    def ended(self) -> list[EndedOp]:
        """The ops that ended since the last call. Raises what went wrong."""
        found: list[EndedOp] = []
        while self._ended:
            one = self._ended.popleft()
            if isinstance(one, BaseException):
                raise one
            self._open.popleft()
            self.num_open -= 1
            found.append(one)
        return found

    def wait_for_first(self) -> bool:
        """Waits until an op has ended, where ranks share a thread. Returns whether one was under way.

        Raises:
            DeadlineExceeded: it did not end in time.
        """
        if not self.num_open:
            return False
        op, timeout = self._open[0]
        if not self._has_come.wait(timeout):
            raise DeadlineExceeded(f"{op} did not end within {timeout:g} s; what its function returned waits")
        self._has_come.clear()
        return True

    def close(self) -> None:
        """Lets the thread end once what it waits for has."""
        self._thread.close()

    def _wait(self, number: int, started: AsyncOpHandle) -> None:
        if self._has_failed:
            return  # and the rank ends with that
        try:
            self._ended.append((number, *started.wait()))
        except BaseException as error:
            self._has_failed = True
            self._ended.append(error)
        self._has_come.set()
        if self._wake is not None:
            self._wake()


class RegisteredAsyncOp:
    """An op whose function has returned something to wait for; see `is_handle`.

    Args:
        timeout: as in `AsyncOpHandle`.
        queue: of the device that the function may have given work to: then the op ends when the device has done that
            too. torch.distributed's wait for NCCL orders streams and returns at once, so `wait` waits for a mark
            behind it.
    """

    def __init__(self, op: Op, handle: Any, timeout: float, queue: DeviceQueue | None = None) -> None:
        self.timeout, self.has_ended = timeout, handle is None and queue is None
        self._op, self._handle, self._queue = op, handle, queue
        self._given = None if queue is None else queue.mark()
        self._start = perf_counter_ns()
        self._times: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def wait(self) -> tuple[int, int]:
        with self._lock:  # the ranks that run it together all wait for it
            if self._times is None:
                if not is_handle(self._handle):
                    raise RuntimeFailure(
                        f"the function of {self._op}, which is asynchronous, returned {type(self._handle).__name__}; "
                        "return what to wait for, with wait() or result(), or None"
                    )
                try:
                    self._wait()
                except Exception as error:
                    error.add_note(f"at the end of {self._op}, which is asynchronous")
                    raise
                self._times = self._start, perf_counter_ns()
            return self._times

    def _wait(self) -> None:
        if self._queue is None or self._given is None:
            wait_for_handle(self._handle)
            return
        with self._queue.waiting():
            wait_for_handle(self._handle)
            self._queue.mark().synchronize()
        self._given.synchronize()


def is_handle(value: Any) -> bool:
    """Whether what a function returned can be waited for: a torch.distributed work, a future; or None."""
    return value is None or hasattr(value, "wait") or hasattr(value, "result")


def wait_for_handle(handle: Any) -> None:
    """Waits for what `is_handle` takes, unless it is None."""
    if handle is not None:
        (handle.wait if hasattr(handle, "wait") else handle.result)()
