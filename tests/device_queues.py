"""Devices that run what they are given later, made of nothing: for what a GPU's queue asks of the runtime.

`LateQueue`: work is done at once, as a CPU does it; but a mark counts as passed only when somebody waits for it, or a
thread lets the device go on. So whoever takes an op for ended because its function has returned is found out.

`TwoLanes`: work is given as functions, and done when somebody waits for a mark, in any order of the two lanes that
waits between them allow. Memory that Python has let go of is taken again at once. So a missing wait gives wrong
numbers.

`LaneClocks`: work is done at once, and a `RaceDetector` says of every op of torch whether a device with two lanes
would have been made to do it after all that it needs. So a whole training step can be held against its rules.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class LaneMark:
    """A mark in one of the lanes."""

    def __init__(self, device: TwoLanes, number: int) -> None:
        self.number, self._device = number, device

    def query(self) -> bool:
        return self.number in self._device.passed

    def synchronize(self) -> None:
        self._device.run_to(self)

    def elapsed_time(self, later: LaneMark) -> float:
        return float(self._device.passed[later.number] - self._device.passed[self.number])


class Wait:
    """Something in a lane that waits for a mark in the other."""

    def __init__(self, mark: LaneMark) -> None:
        self.mark = mark


class Cell:
    """A number in the memory of a device, taken in the lane that is given work; freed with the last reference to it.

    Attributes:
        value: what is there when all ops are run in the order in which they are launched.
    """

    def __init__(self, device: TwoLanes, value: int = 0) -> None:
        self.value = value
        self._device, self._lane = device, device.current
        free = device.free[self._lane]
        self.place = free.pop() if free else len(device.memory)
        if self.place == len(device.memory):
            device.memory.append(0)

    def __del__(self) -> None:
        self._device.free[self._lane].append(self.place)


class TwoLanes(WatchedMarks):
    """Args:
    seed: of the order in which lanes go on.
    forgets: the numbers of waits that are left out, counted from 0.

    Attributes:
        memory: by place. free: by lane, places that may be taken again. current: the lane that is given work.
        passed: marks that were passed, and when. num_waits: so far. waits_of: of each lane, the numbers of its own.
    """

    def __init__(self, seed: int, forgets: Sequence[int] = ()) -> None:
        super().__init__()
        self.memory: list[int] = []
        self.free: tuple[list[int], list[int]] = [], []
        self.waits_of: tuple[list[int], list[int]] = [], []
        self.current = self.num_waits = 0
        self.passed: dict[int, int] = {}
        self._given: tuple[deque[Any], deque[Any]] = deque(), deque()
        self._forgets, self._random, self._num_marks = set(forgets), random.Random(seed), 0

    def give(self, work: Callable[[list[int]], None]) -> None:
        """Has the lane do something with the memory, behind what it was given before."""
        self._given[self.current].append(work)

    def mark(self, sleeps: bool = True) -> LaneMark:
        self._num_marks += 1
        mark = LaneMark(self, self._num_marks)
        self._given[self.current].append(mark)
        return mark

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    def after(self, mark: LaneMark) -> None:
        if self.num_waits not in self._forgets:
            self._given[self.current].append(Wait(mark))
        self.waits_of[self.current].append(self.num_waits)
        self.num_waits += 1

    def run_to(self, mark: LaneMark) -> None:
        """Goes on until a mark is passed, in an order of its own."""
        while mark.number not in self.passed:
            self._go_on()

    def run_all(self) -> None:
        while any(self._given):
            self._go_on()

    def _go_on(self) -> None:
        lanes = [lane for lane in self._given if lane and not self._is_held_up(lane[0])]
        assert lanes, "both lanes wait for one another"
        lane = self._random.choice(lanes)
        for _ in range(self._random.choice((1, 1, 30))):
            if not lane or self._is_held_up(lane[0]):
                return
            given = lane.popleft()
            if isinstance(given, LaneMark):
                self.passed[given.number] = len(self.passed)
            elif not isinstance(given, Wait):
                given(self.memory)

    def _is_held_up(self, given: Any) -> bool:
        return isinstance(given, Wait) and given.mark.number not in self.passed

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        return nullcontext()

    def waiting(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def watch(self, mark: Any, then: Callable[[], None]) -> None:
        """Whoever waits for a mark has the device go on."""


Clock = tuple[int, int]
"""How far each lane has come, in ops."""


class ClockMark:
    """A mark, and what the device has done when it passes it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """All that was given has been done."""

    def elapsed_time(self, later: ClockMark) -> float:
        return float(sum(later.clock) - sum(self.clock))


class LaneClocks(WatchedMarks):
    """What each lane is sure to come after.

    Attributes:
        clocks: of each lane, the ops of both that it comes after. current: the lane that is given work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: list[Clock] = [(0, 0), (0, 0)]
        self.current = 0
        self.num_ops = [0, 0]

    def step(self) -> int:
        """Counts an op of the current lane; returns its number there."""
        lane = self.current
        self.num_ops[lane] += 1
        one, other = self.clocks[lane]
        self.clocks[lane] = (one + 1, other) if lane == 0 else (one, other + 1)
        return self.num_ops[lane]

    def mark(self, sleeps: bool = True) -> ClockMark:
        return ClockMark(self.clocks[self.current])

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    def after(self, mark: ClockMark) -> None:
        (a, b), (c, d) = self.clocks[self.current], mark.clock
        self.clocks[self.current] = max(a, c), max(b, d)

    def beside(self, payload: Payload) -> AbstractContextManager[Any]:
        return nullcontext()

    def waiting(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def watch(self, mark: Any, then: Callable[[], None]) -> None:
        """All that was given has been done."""


class Block:
    """The memory of a tensor: the lane that it was taken in, and what used it last.

    Attributes:
        written: the lane and number of the op that wrote it last. read: of each lane, the op that read it last.
    """

    def __init__(self, storage: Any, lane: int) -> None:
        self.alive, self.lane = StorageWeakRef(storage), lane
        self.written: tuple[int, int] | None = None
        self.read = [0, 0]

    def uses(self) -> list[tuple[int, int]]:
        return [*enumerate(self.read), *([] if self.written is None else [self.written])]


class RaceDetector(TorchDispatchMode):
    """Around ops of torch: asks whether a device with two lanes would have done each of them in time.

    An op must come after what wrote all that it reads, and after what read or wrote all that it writes. And an op
    that takes memory must come after all uses of what has been freed in its lane, as it might be given that.

    Attributes:
        races: those that were found, in words.
        beside: ops that were given to a lane while the other had not come to all that it was given.
    """

    def __init__(self, clocks: LaneClocks) -> None:
        super().__init__()
        self.clocks, self.beside = clocks, 0
        self.races: list[str] = []
        self._blocks: dict[int, Block] = {}
        self._freed: tuple[list[Block], list[Block]] = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outcome = func(*args, **kwargs)
        clocks, lane = self.clocks, self.clocks.current
        number = clocks.step()
        clock, other = clocks.clocks[lane], 1 - lane
        self.beside += clock[other] < clocks.num_ops[other]
        given, changed = tree_leaves((args, kwargs)), self._changed(func, args, kwargs)
        # What is not known yet was made before all this, in the lane of all else.
        read = {id(block): block for value in given if (block := self._block(value, 0)) is not None}
        for block in read.values():
            if block.written is not None and not _is_before(block.written, clock):
                self.races.append(
                    f"{func} in lane {lane} reads what lane {block.written[0]} may not have written yet"
                )
            block.read[lane] = number
        leaves = tree_leaves(outcome)
        made = {id(block): block for value in leaves if (block := self._block(value, lane)) is not None}
        if new := [block for key, block in made.items() if key not in read and block.written is None]:
            if clock[other] < clocks.num_ops[other]:  # else everything freed has been done with
                self._sweep()
            for block in self._freed[lane]:
                if not all(_is_before(use, clock) for use in block.uses()):
                    self.races.append(f"{func} in lane {lane} may take memory that lane {other} still uses")
            self._freed[lane].clear()
        for block in [*new, *(self._block(tensor, lane) for tensor in changed)]:
            if block is None:
                continue
            before = [use for use in block.uses() if use != (lane, number)]
            if not all(_is_before(use, clock) for use in before):
                self.races.append(f"{func} in lane {lane} writes what lane {other} may not have done with")
            block.written = lane, number
        return outcome

    def _changed(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """What an op changes in place."""
        found = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
        return found

    def _block(self, value: Any, lane: int) -> Block | None:
        if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.untyped_storage().nbytes():
            return None
        storage = value.untyped_storage()
        known = self._blocks.get(storage._cdata)
        if known is None or known.alive.expired():
            if known is not None:
                self._freed[known.lane].append(known)
            known = self._blocks[storage._cdata] = Block(storage, lane)
        return known

    def _sweep(self) -> None:
        """Takes note of memory that has been freed."""
        for key, block in list(self._blocks.items()):
            if block.alive.expired():
                self._freed[block.lane].append(block)
                del self._blocks[key]


def _is_before(use: tuple[int, int], clock: Clock) -> bool:
    lane, number = use
    return number <= clock[lane]


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
