"""Ops that a rank gives to a GPU and does not wait for. Marks in the GPU's queue say when they ran.

    rank      F4 launched | F5 launched | waits: two are under way | B0 launched
    device     ...|==== F4 ====|==== F5 ====|==== B0
    messages                   '-- that of F4 leaves, F5 runs on

A rank launches one op behind the one that runs, so that the GPU never waits for Python. It launches no more than
that, because it decides what comes next when it knows which messages have arrived. An op's message leaves once the
GPU has passed the mark behind the op; it is copied while the next op runs. A thread waits for the marks, and wakes
the rank as if a message had come.

DeviceQueue   the work that a GPU was given, and marks in it
DeviceClock   what the GPU's clock says in terms of ours
LaunchedOps   the ops of one rank in one step that lie in the queue

A CPU has run an op when its function returns. It has no queue, and needs none of this.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.schedule import Op

T = TypeVar("T")

MOST_LAUNCHED_OPS = 2
"""Ops under way on a device: the one that runs, and one behind it."""
FEWEST_LOOKS, MOST_LOOKS = 3, 10
"""Looks at the two clocks with which a step begins: at least, and at most where the host is busy."""
CLOCK_TOLERANCE_NS = 50_000
"""A look that took at most so many nanoseconds says well enough how the device's clock stands to ours."""


class DeviceMark(Protocol):
    """A place in a device's queue of work."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Waits until the device has passed it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from here to a later mark; the device has passed both."""


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


class DeviceQueue:
    """The work that a GPU was given and runs later than the call returns: its current stream, marked by events.

    Two more streams keep apart what must not wait for that work. Copies of messages wait for nothing that was given
    since their op. A wait for a collective makes its stream wait, where a copy would wait along.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies, self._waits = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._thread = WaitingThread("penstock-marks")

    def mark(self, sleeps: bool = True) -> DeviceMark:
        """Marks the place behind all that the device was given so far.

        Args:
            sleeps: whether a thread that waits for the mark sleeps. One that spins goes on some microseconds sooner.
        """
        event = torch.cuda.Event(enable_timing=True, blocking=sleeps)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        """Around copies of a payload whose op has ended: they wait for nothing that the device was given since."""
        for leaf in payload.leaves:
            if leaf is not None and leaf.is_cuda:
                leaf.record_stream(self._copies)  # its memory is not used again before it is copied
        return torch.cuda.stream(self._copies)

    def waiting(self) -> AbstractContextManager[Any]:
        """Around a wait for a collective that orders what follows: only marks made there come after it."""
        return torch.cuda.stream(self._waits)

    def watch(self, mark: DeviceMark, then: Callable[[], None]) -> None:
        """Has `then` called by another thread once the device has passed a mark."""

        def wait() -> None:
            try:
                mark.synchronize()
            except RuntimeError:
                pass  # an op failed on the device: the rank, once woken, finds out by asking
            finally:
                then()

        self._thread.put(wait)

    def close(self) -> None:
        """Ends that thread."""
        self._thread.close()


def queue_of(device: torch.device) -> DeviceQueue | None:
    """The queue of a device; None for one that has run an op when its function returns."""
    return DeviceQueue(device) if device.type == "cuda" else None


class ClockLook(NamedTuple):
    """A mark that was passed between two looks at our clock.

    Attributes:
        width: nanoseconds between the looks. middle: the moment halfway, by our clock.
    """

    width: int
    middle: int
    mark: DeviceMark


class DeviceClock:
    """How the clock of a device stands to ours in one step, for all ranks of a process.

    A step begins with a few marks, each passed between two looks at our clock and taken to be passed halfway. The one
    with the narrowest looks counts, as it can be wrong by half of that time at most:

        our clock    |look ........ mark ........ look|   |look . mark . look|   <-- this one
        device                        ^                             ^

    Where another process has the processor between two looks, that time is milliseconds. So there is one reading for
    all ranks of a process: ops that ran one after the other can't overlap, whatever the reading is wrong by. The next
    step has one of its own, since the two clocks drift apart.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._look: ClockLook | None = None

    def read(self) -> None:
        """Before a rank launches its first op. The first one to ask waits for what the device was given before."""
        if self._look is not None:
            return
        self._queue.mark().synchronize()
        best = self._new_look()
        for number in range(1, MOST_LOOKS):
            if number >= FEWEST_LOOKS and best.width <= CLOCK_TOLERANCE_NS:
                break
            best = min(best, self._new_look(), key=lambda look: look.width)
        self._look = best

    def _new_look(self) -> ClockLook:
        before = perf_counter_ns()
        mark = self._queue.mark(sleeps=False)
        mark.synchronize()
        after = perf_counter_ns()
        return ClockLook(after - before, (before + after) // 2, mark)

    def moment(self, mark: DeviceMark) -> int:
        """When a mark was passed that came after `read`, in nanoseconds of our clock."""
        assert self._look is not None  # `read` comes first
        return self._look.middle + round(self._look.mark.elapsed_time(mark) * 1e6)


class LaunchedOps:
    """The ops of one rank in one step that a device was given.

    Args:
        most: ops under way; 1 where each is waited for before anything else is done. That must be where ops wait in
            their middle for other ranks, or a wait for messages can't be ended when a mark is passed.
        clock: of the device in this step; one of its own where not given.

    Attributes:
        queue: of the device. num_launched: ops of the step so far.
        num_ended: those of them of which `ended` has told.
    """

    def __init__(self, queue: DeviceQueue, most: int = MOST_LAUNCHED_OPS, clock: DeviceClock | None = None) -> None:
        self.queue, self._most = queue, most
        self._clock = clock or DeviceClock(queue)
        self._wake: Callable[[], None] | None = None
        self._under_way: deque[tuple[Op, DeviceMark, DeviceMark]] = deque()
        """Each op between its two marks."""
        self.num_launched = self.num_ended = 0

    @property
    def is_full(self) -> bool:
        """Whether no op may be launched until one has ended."""
        return len(self._under_way) >= self._most

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

    def launch(self, op: Op, run: Callable[[], T]) -> T:
        """Calls a function that gives an op to the device. Returns what the function returns."""
        start = self.queue.mark()
        outputs = run()
        end = self.queue.mark()
        self._under_way.append((op, start, end))
        self.num_launched += 1
        if self._most == 1:
            self.wait()
        elif self._wake is not None:
            self.queue.watch(end, self._wake)
        return outputs

    def ended(self) -> list[tuple[Op, int, int]]:
        """Ops that have ended since the last call, and when they began and ended (ns of the monotonic clock).

        Raises:
            RuntimeFailure: the device failed.
        """
        found: list[tuple[Op, int, int]] = []
        moment = self._clock.moment
        while self._under_way:
            op, start, end = self._under_way[0]
            try:
                if not end.query():
                    break
                found.append((op, moment(start), moment(end)))
            except RuntimeError as error:
                raise _device_failed(op, error) from error
            self._under_way.popleft()
            self.num_ended += 1
        return found

    def wait(self) -> None:
        """Waits until the first op under way has ended. Raises as `ended`."""
        op, _, end = self._under_way[0]
        try:
            end.synchronize()
        except RuntimeError as error:
            raise _device_failed(op, error) from error


def _device_failed(op: Op, error: RuntimeError) -> RuntimeFailure:
    return RuntimeFailure(f"the device failed in {op.short()} of stage {op.stage}: {error}")
