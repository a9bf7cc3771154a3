"""Ops that a rank launches on a device without waiting for them. Marks on the device time them, and are read later.

    rank      F4 launched | F5 launched | waits: two are under way | B0 launched
    device     ...|==== F4 ====|==== F5 ====|==== B0
    messages                   '-- that of F4 leaves, F5 runs on

A rank launches one op behind the one that runs, so that the device never waits for Python. It launches no more than
that, because it decides what comes next when it knows which messages have arrived. A message leaves once the device
has passed the mark of its op; it is copied while the next op runs. A thread waits for the marks, and wakes the rank
as if a message had come.

A CPU has run an op when its function returns. It has no queue, and needs none of this.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.schedule import Op
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT

MOST_LAUNCHED_OPS = 2
"""Ops under way on a device: the one that runs, and one behind it."""
LOOKS_AT_THE_CLOCK, MOST_LOOKS = 3, 10
"""Marks with which a step begins: at least, and at most where the host is busy."""
CLOCK_TOLERANCE_NS = 50_000
"""Nanoseconds within which a mark is passed that says well enough how the clock of the device stands to ours."""
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
        """Behind all that the device was given so far.

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


class WaitingThread:
    """A thread that waits for one thing after the other. It starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, wait: Callable[[], None]) -> None:
        """Has it call `wait`, which raises nothing, behind all that it was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_wait_for_all, args=(self._waits,), name=self._name, daemon=True)
            self._thread.start()
        self._waits.put(wait)

    def close(self) -> None:
        """Lets it end once what it waits for has come."""
        self._waits.put(None)


def _wait_for_all(waits: SimpleQueue[Callable[[], None] | None]) -> None:
    while (wait := waits.get()) is not None:
        wait()


class WatchedMarks:
    """Marks that a thread waits for, one after the other."""

    def __init__(self) -> None:
        self._thread = WaitingThread("penstock-marks")

    def watch(self, mark: DeviceMark, then: Callable[[], None]) -> None:
        """See `DeviceQueue`."""

        def wait() -> None:
            try:
                mark.synchronize()
            except RuntimeError:
                pass  # an op failed on the device: the rank, once woken, finds out by asking
            finally:
                then()

        self._thread.put(wait)

    def close(self) -> None:
        """See `DeviceQueue`."""
        self._thread.close()


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


class DeviceClock:
    """How the clock of a device stands to ours in one step, for all ranks of a process that share the device.

    A step begins with a few marks. Each is passed between two looks at our clock, and taken to be passed halfway. Of
    these marks the one that was passed soonest counts, as it can be wrong by half of that time at most:

        our clock    |look ........ mark ........ look|   |look . mark . look|   <-- this one
        device                        ^                             ^

    Where another process has the processor between two looks, that time is milliseconds. So there is one reading for
    all ranks. By readings of their own, ops that ran one after the other would overlap by what these are wrong by; by
    one they can't, whatever it is wrong by. The next step has one of its own, since the two clocks drift apart.
    Another process has its own as well, so that what it runs on the same device may seem to overlap with this.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._origin: DeviceMark | None = None
        self._origin_ns = 0

    def read(self) -> None:
        """Before a rank launches its first op. The first one to ask waits for what the device was given before."""
        with self._lock:
            if self._origin is not None:
                return
            self._queue.mark().synchronize()
            origin, narrowest = None, 0
            for number in range(MOST_LOOKS):
                before = perf_counter_ns()
                mark = self._queue.mark(sleeps=False)
                mark.synchronize()
                after = perf_counter_ns()
                if origin is None or after - before < narrowest:
                    origin, narrowest, self._origin_ns = mark, after - before, (before + after) // 2
                if number + 1 >= LOOKS_AT_THE_CLOCK and narrowest <= CLOCK_TOLERANCE_NS:
                    break
            self._origin = origin

    def moment(self, mark: DeviceMark) -> int:
        """When a mark was passed that came later, in nanoseconds of our clock."""
        if self._origin is None:
            raise RuntimeFailure("a device's mark was asked for its time before the step's clock was read")
        return self._origin_ns + round(self._origin.elapsed_time(mark) * 1e6)


@dataclass(slots=True, eq=False)
class LaunchedOp:
    """An op under way, between two marks."""

    op: Op
    start: DeviceMark
    end: DeviceMark


class LaunchedOps:
    """The ops of one rank in one step that a device was given.

    Args:
        most: ops under way; 1 where each is waited for before anything else is done. That must be where ops wait in
            their middle for other ranks, or a wait for messages can't be ended when a mark is passed.
        clock: of the device in this step, where other ranks of this process have the device too.
    """

    def __init__(self, queue: DeviceQueue, most: int = MOST_LAUNCHED_OPS, clock: DeviceClock | None = None) -> None:
        self._queue, self.most = queue, most
        self._clock = clock or DeviceClock(queue)
        self._wake: Callable[[], None] | None = None
        self._under_way: deque[LaunchedOp] = deque()
        self._started: DeviceMark
        self.num_ended = 0
        """Ops of the step that have ended, those launched before them too."""

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
        """Starts a step, once it is known how the device's clock stands to ours.

        Args:
            wake: ends the rank's wait for messages; None where it shares its thread with other ranks.
        """
        self._wake = wake
        self._clock.read()

    def start(self) -> None:
        """Just before an op is launched."""
        self._started = self._queue.mark()

    def launched(self, op: Op) -> None:
        """Just after."""
        end = self._queue.mark()
        self._under_way.append(LaunchedOp(op, self._started, end))
        if self._wake is not None and self.most > 1:
            self._queue.watch(end, self._wake)

    def ended(self) -> list[tuple[Op, int, int]]:
        """Ops that have ended since the last call, and when they began and ended (ns of the monotonic clock).

        Raises:
            RuntimeFailure: the device failed.
        """
        found: list[tuple[Op, int, int]] = []
        moment = self._clock.moment
        while self._under_way:
            one = self._under_way[0]
            try:
                if not one.end.query():
                    break
                found.append((one.op, moment(one.start), moment(one.end)))
            except RuntimeError as error:
                raise _device_failed(one.op, error) from error
            self._under_way.popleft()
            self.num_ended += 1
        return found

    def wait(self) -> None:
        """Waits until the first op under way has ended. Raises as `ended`."""
        one = self._under_way[0]
        try:
            one.end.synchronize()
        except RuntimeError as error:
            raise _device_failed(one.op, error) from error

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        """Around the sending of a message whose op has ended; see `DeviceQueue`."""
        return self._queue.beside(payload)


def _device_failed(op: Op, error: RuntimeError) -> RuntimeFailure:
    return RuntimeFailure(f"the device failed in {op.short()} of stage {op.stage}: {error}")
