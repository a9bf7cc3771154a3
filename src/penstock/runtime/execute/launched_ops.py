"""Ops that a rank has launched on a device and does not wait for: timed by marks that the device passes, read later.

    rank      F4 launched | F5 launched | waits: two are under way | B0 launched
    device     ...|==== F4 ====|==== F5 ====|==== B0
    messages                   '-- that of F4 leaves, F5 runs on

A rank launches an op behind the one that runs, so that the device never waits for Python, and no more: what comes
next is decided when it is known what has come in. A message leaves once the device has passed the mark of its op,
copied beside what runs now. A thread waits for the marks, and wakes the rank as if a message had come.

A CPU has run an op when its function returns. It has no queue, and its ops have none of this.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.schedule import Op
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT

AHEAD = 2
"""Ops under way on a device: the one that runs, and one behind it."""
LOOKS_AT_THE_CLOCK = 3
"""Marks with which a step begins. The one that was passed soonest says how the clock of the device stands to
ours, so that ops of several ranks on one device lie on one axis."""
WAITS_FOR_NOBODY = frozenset({FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE})
"""Kinds of ops in whose middle a rank waits for no other. Before any other op is launched, all messages must have
left: a rank that stands in the middle of one sends nothing, and others may need just that to come there."""


class DeviceMark(Protocol):
    """A place in a device's queue of work."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Waits until the device has passed it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from here to a later mark; the device has passed both."""


class DeviceQueue(Protocol):
    """A device that runs what it is given later than the call returns."""

    def mark(self, sleeps: bool = True) -> DeviceMark:
        """Behind all that it was given so far.

        Args:
            sleeps: whether a thread that waits for it sleeps. One that spins goes on tens of microseconds sooner.
        """

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        """Around copies of a payload whose op has ended: they wait for nothing that the device was given since."""

    def waiting(self) -> AbstractContextManager[Any]:
        """Around a wait for a collective that orders what follows: only marks made there come after it."""

    def watch(self, mark: DeviceMark, then: Callable[[], None]) -> None:
        """Has `then` called by another thread once the device has passed a mark."""

    def close(self) -> None:
        """Ends that thread."""


class WatchedMarks:
    """A thread that waits for one mark after the other."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[DeviceMark, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, mark: DeviceMark, then: Callable[[], None]) -> None:
        """See `DeviceQueue`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_wait_for_all, args=(self._waiting,), name="penstock-marks", daemon=True
            )
            self._thread.start()
        self._waiting.put((mark, then))

    def close(self) -> None:
        """Lets the thread end once what it waits for has come."""
        self._waiting.put(None)


def _wait_for_all(waiting: SimpleQueue[tuple[DeviceMark, Callable[[], None]] | None]) -> None:
    while (item := waiting.get()) is not None:
        mark, then = item
        try:
            mark.synchronize()
        except RuntimeError:
            pass  # an op failed on the device: the rank, once woken, finds out by asking
        finally:
            then()


class CudaQueue(WatchedMarks):
    """The current stream of a GPU, marked by events; copies go on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._copies, self._waits = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self, sleeps: bool = True) -> DeviceMark:
        event = torch.cuda.Event(enable_timing=True, blocking=sleeps)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        for leaf in payload.leaves:
            if leaf is not None and leaf.is_cuda:
                leaf.record_stream(self._copies)  # its memory is not used again before it is copied
        return torch.cuda.stream(self._copies)

    def waiting(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._waits)


def queue_of(device: torch.device) -> DeviceQueue | None:
    """What a device queues its work in; None for one that has run an op when its function returns."""
    return CudaQueue(device) if device.type == "cuda" else None


class LaunchedOps:
    """The ops of one rank in one step that a device was given.

    Args:
        most: ops under way; 1 where each is waited for before anything else is done. That must be where ops wait in
            their middle for other ranks, or a wait for messages can't be ended when a mark is passed.
    """

    def __init__(self, queue: DeviceQueue, most: int = AHEAD) -> None:
        self._queue, self.most = queue, most
        self._wake: Callable[[], None] | None = None
        self._under_way: deque[tuple[Op, DeviceMark, DeviceMark]] = deque()
        self._origin: DeviceMark
        self._started: DeviceMark
        self._origin_ns = 0
        self.num_ended = 0
        """Ops of the step that have ended. They end in the order in which they were launched."""

    @property
    def num_launched(self) -> int:
        return self.num_ended + len(self._under_way)

    @property
    def is_full(self) -> bool:
        """Whether no op may be launched until one has ended."""
        return len(self._under_way) >= self.most

    @property
    def is_empty(self) -> bool:
        return not self._under_way

    def begin(self, wake: Callable[[], None] | None) -> None:
        """Starts a step, by a mark whose moment is known. It waits for what the device was given before.

        Args:
            wake: ends the rank's wait for messages; None where it shares its thread with other ranks.
        """
        self._wake = wake
        self._queue.mark().synchronize()
        narrowest = None
        for _ in range(LOOKS_AT_THE_CLOCK):
            before = perf_counter_ns()
            origin = self._queue.mark(sleeps=False)
            origin.synchronize()
            after = perf_counter_ns()
            if narrowest is None or after - before < narrowest:
                narrowest, self._origin, self._origin_ns = after - before, origin, (before + after) // 2

    def start(self) -> None:
        """Just before an op is launched."""
        self._started = self._queue.mark()

    def launched(self, op: Op) -> None:
        """Just after."""
        end = self._queue.mark()
        self._under_way.append((op, self._started, end))
        if self._wake is not None and self.most > 1:
            self._queue.watch(end, self._wake)

    def ended(self) -> list[tuple[Op, int, int]]:
        """Ops that have ended since the last call, and when they began and ended (ns of the monotonic clock).

        Raises:
            RuntimeFailure: the device failed.
        """
        found: list[tuple[Op, int, int]] = []
        while self._under_way:
            op, start, end = self._under_way[0]
            try:
                if not end.query():
                    break
                found.append((op, self._moment(start), self._moment(end)))
            except RuntimeError as error:
                raise RuntimeFailure(f"the device failed in {op.short()} of stage {op.stage}: {error}") from error
            self._under_way.popleft()
            self.num_ended += 1
        return found

    def wait(self) -> None:
        """Waits until the first op under way has ended. Raises as `ended`."""
        op, _, end = self._under_way[0]
        try:
            end.synchronize()
        except RuntimeError as error:
            raise RuntimeFailure(f"the device failed in {op.short()} of stage {op.stage}: {error}") from error

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        """Around the sending of a message whose op has ended; see `DeviceQueue`."""
        return self._queue.beside(payload)

    def _moment(self, mark: DeviceMark) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(mark) * 1e6)


class OnDevice:
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
                (self._handle.wait if hasattr(self._handle, "wait") else self._handle.result)()
                self._queue.mark().synchronize()
        self._given.synchronize()

    def done(self) -> bool:
        for name in ("is_completed", "done"):
            if hasattr(self._handle, name):
                return bool(getattr(self._handle, name)()) and self._given.query()
        return self._handle is None and self._given.query()
