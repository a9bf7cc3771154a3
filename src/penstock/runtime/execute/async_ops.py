"""Asynchronous ops: what starts them and waits for their ends, beside the other ops of a rank.

    rank     start(G0) ---- F2 ---- F3 -- ended: G0 -- B0        what needs G0 waits for that
    stream      |~~~~~~ G0 ~~~~~~~|

`start` returns something to wait for. If a rank has a process or a thread of its own, a thread of its stream waits
for one op after another, and wakes the rank (`WatchedStream`). Ranks that share one thread poll, and wait only when
none of them can do anything else (`SharedThreadStream`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.execute.launched_ops import DeviceQueue, WaitingThread
from penstock.runtime.tensors.message import Payload
from penstock.schedule import Op


class AsyncOpHandle(Protocol):
    """An op under way."""

    def wait(self) -> tuple[int, int]:
        """Waits for its end; returns when it began and ended, in nanoseconds of the monotonic clock."""

    def done(self) -> bool:
        """Whether it has ended, as far as that can be told without waiting."""

    def wait_alone(self) -> None:
        """Waits for its end where nothing else goes on meanwhile. Raises DeadlineExceeded."""


Start = Callable[[Op, Sequence[Payload]], AsyncOpHandle]
"""What starts an asynchronous op, given what its incoming edges brought."""


class EndedOp(NamedTuple):
    """An op that has ended, by its number, and when it began and ended (ns)."""

    number: int
    start: int
    end: int


class Stream(Protocol):
    """The asynchronous ops of one rank in one step."""

    @property
    def num_open(self) -> int:
        """Ops started of which `ended` has not told yet."""

    def start(self, number: int, op: Op, received: Sequence[Payload]) -> None:
        """Starts an op."""

    def ended(self) -> list[EndedOp]:
        """Those that ended since the last call. Raises what went wrong."""

    def wait_for_first(self) -> bool:
        """Waits for the first op under way, where nobody else does; whether there was one."""

    def close(self) -> None:
        """Ends it with its step."""


class WatchedStream:
    """The stream of a rank with a thread of its own.

    Args:
        wake: ends the rank's wait for messages; called in the stream's thread.
    """

    def __init__(self, start: Start, wake: Callable[[], None]) -> None:
        self._num_open = 0
        self._start, self._wake = start, wake
        self._ended: deque[EndedOp | BaseException] = deque()
        self._thread = WaitingThread("penstock-stream")
        self._has_failed = False

    @property
    def num_open(self) -> int:
        return self._num_open

    def start(self, number: int, op: Op, received: Sequence[Payload]) -> None:
        started = self._start(op, received)
        self._num_open += 1
        self._thread.put(partial(self._wait, number, started))

    def ended(self) -> list[EndedOp]:
        found: list[EndedOp] = []
        while self._ended:
            one = self._ended.popleft()
            if isinstance(one, BaseException):
                raise one
            self._num_open -= 1
            found.append(one)
        return found

    def wait_for_first(self) -> bool:
        return False

    def close(self) -> None:
        """Lets the thread end once what it waits for has."""
        self._thread.close()

    def _wait(self, number: int, started: AsyncOpHandle) -> None:
        if self._has_failed:
            return  # and the rank ends with that
        try:
            self._ended.append(EndedOp(number, *started.wait()))
        except BaseException as error:
            self._has_failed = True
            self._ended.append(error)
        finally:
            self._wake()


class SharedThreadStream:
    """The stream of a rank that shares its thread with others."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._open: deque[tuple[int, AsyncOpHandle]] = deque()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self, number: int, op: Op, received: Sequence[Payload]) -> None:
        self._open.append((number, self._start(op, received)))

    def ended(self) -> list[EndedOp]:
        found: list[EndedOp] = []
        while self._open and self._open[0][1].done():
            number, started = self._open.popleft()
            found.append(EndedOp(number, *started.wait()))
        return found

    def wait_for_first(self) -> bool:
        if not self._open:
            return False
        self._open[0][1].wait_alone()
        return True

    def close(self) -> None:
        """There is no thread to end."""


class AwaitableOpHandle:
    """An op under way behind something with `wait()` or `result()`: a torch.distributed work, a future; or nothing,
    where it has ended already.

    Args:
        timeout: seconds that a rank waits for it when it can do nothing else.
    """

    def __init__(self, op: Op, handle: Any, timeout: float) -> None:
        self._op, self._handle, self._timeout = op, handle, timeout
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
                    wait_for_handle(self._handle)
                except Exception as error:
                    error.add_note(f"at the end of {self._op}, which is asynchronous")
                    raise
                self._times = self._start, perf_counter_ns()
            return self._times

    def done(self) -> bool:
        return self._times is not None or is_handle_done(self._handle)

    def wait_alone(self) -> None:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                self.wait()
            except BaseException as error:
                failed.append(error)

        waiting = threading.Thread(target=wait, name="penstock-wait", daemon=True)
        waiting.start()
        waiting.join(self._timeout)
        if waiting.is_alive():
            raise DeadlineExceeded(
                f"{self._op} did not end within {self._timeout:g} s; what its function returned waits"
            )
        if failed:
            raise failed[0]


class DeviceOpHandle:
    """The end of an asynchronous op whose function gave work to a device: that of its own handle, then a mark.

    torch.distributed's wait for NCCL orders streams and returns at once, so the end is marked behind it.

    Args:
        handle: with `wait()` or `result()`; None where the function left nothing to wait for.
    """

    def __init__(self, queue: DeviceQueue, handle: Any) -> None:
        self._queue, self._handle = queue, handle
        self._given = queue.mark()

    def wait(self) -> None:
        with self._queue.waiting():
            if self._handle is not None:
                wait_for_handle(self._handle)
                self._queue.mark().synchronize()
        self._given.synchronize()

    def done(self) -> bool:
        return is_handle_done(self._handle) and self._given.query()


def is_handle(value: Any) -> bool:
    """Whether what a function returned can be waited for: a torch.distributed work, a future; or None."""
    return value is None or hasattr(value, "wait") or hasattr(value, "result")


def wait_for_handle(handle: Any) -> None:
    """Waits for what `is_handle` takes, unless it is None."""
    if handle is not None:
        (handle.wait if hasattr(handle, "wait") else handle.result)()


def is_handle_done(handle: Any) -> bool:
    """Whether it has ended, as far as that can be told without waiting."""
    ask = next((getattr(handle, name) for name in ("is_completed", "done") if hasattr(handle, name)), None)
    return handle is None if ask is None else bool(ask())
