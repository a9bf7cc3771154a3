"""A ring of threads that adds up numbers by real messages over conditioned links, chunk by chunk.

    step 0, 1, ..., dp - 2          member i sends part i - step on, and the next one adds it to its own
    step dp - 1, ..., 2 (dp - 1)    the parts that are whole now go round once more, and replace what is there

A chunk leaves when its part has come that far, when the chunk before has left, and when no more than a window of
chunks is under way: the rule of `penstock.cost.ring`, run by the clock. No sleep ends on time, so a chunk counts as
handed over at the moment when what it waited for was there; what a member is late does not add up over hundreds.
"""

from __future__ import annotations

import heapq
import threading
import time
from typing import NamedTuple

from penstock.cost.ring import Ring
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.transport.conditioned import Conditions

Parts = list[list[float]]
"""Of each part of a vector, a number a chunk."""


class Chunk(NamedTuple):
    """A message: when it is there (ns of the monotonic clock), its place in the order, what it carries."""

    due: int
    number: int
    value: float


class _Inbox:
    """What was sent to one member."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[Chunk] = []


class EmulatedRing:
    """The ring of one rank: a thread a replica calls `all_reduce` for one stage after the other.

    Args:
        conditions: of the links between members, from each to the next.
        timeout: seconds that any wait may last.
    """

    def __init__(self, ring: Ring, conditions: Conditions, num_members: int, timeout: float) -> None:
        self._ring, self._conditions, self._num, self._timeout = ring, conditions, num_members, timeout
        self._boxes = [_Inbox() for _ in range(num_members)]
        self._met = threading.Barrier(num_members)
        self._lost = False

    def lose(self) -> None:
        """Lets all members know that something failed."""
        self._lost = True
        self._met.abort()
        for box in self._boxes:
            with box.changed:
                box.changed.notify()

    def all_reduce(self, member: int, num_bytes: float, own: float) -> tuple[int, int, Parts]:
        """Adds up `own`, a number that stands for each chunk of the member's bytes, over all members.

        Returns:
            When all members were there and when this one had the sum (ns of the monotonic clock), and the sum.

        Raises:
            DeadlineExceeded, PeerLost: a member or a chunk did not come.
        """
        count, size = self._ring.chunks(num_bytes, self._num)
        parts = [[own] * count for _ in range(self._num)]
        self._meet(member)
        begin = time.perf_counter_ns()
        total, under_way = 2 * (self._num - 1) * count, self._ring.under_way
        after = (member + 1) % self._num
        came: list[int] = []
        dues: list[int] = []
        while len(dues) < total or len(came) < total:
            for chunk in self._arrived(member):
                if chunk.number != len(came):
                    raise RuntimeFailure(f"member {member} of a ring got chunk {chunk.number}, not {len(came)}")
                step, place = divmod(len(came), count)
                part = parts[(member - 1 - step) % self._num]
                part[place] = part[place] + chunk.value if step < self._num - 1 else chunk.value
                came.append(chunk.due)
            room_at = None
            while (number := len(dues)) < total and len(came) > number - count:
                room_at = dues[number - under_way] if under_way and number >= under_way else begin
                if room_at > time.perf_counter_ns():
                    break
                moment = max(room_at, came[number - count] if number >= count else begin)
                step, place = divmod(number, count)
                due = self._conditions.due(member, after, size, moment)
                self._put(after, Chunk(due, number, parts[(member - step) % self._num][place]))
                dues.append(due)
                room_at = None
            if len(dues) < total or len(came) < total:
                self._wait(member, room_at, len(came))
        return begin, time.perf_counter_ns(), parts

    def _meet(self, member: int) -> None:
        """Waits for all members, as a collective of a communicator does."""
        try:
            self._met.wait(self._timeout)
        except threading.BrokenBarrierError:
            if self._lost:
                raise PeerLost(
                    f"member {member} of a ring waits for the others, and another part of the run failed"
                ) from None
            raise DeadlineExceeded(
                f"member {member} of a ring waited {self._timeout:g} s for the other members"
            ) from None

    def _put(self, member: int, chunk: Chunk) -> None:
        box = self._boxes[member]
        with box.changed:
            heapq.heappush(box.waiting, chunk)
            box.changed.notify()

    def _arrived(self, member: int) -> list[Chunk]:
        box, found = self._boxes[member], []
        with box.changed:
            while box.waiting and box.waiting[0].due <= time.perf_counter_ns():
                found.append(heapq.heappop(box.waiting))
        return found

    def _wait(self, member: int, room_at: int | None, came: int) -> None:
        """Waits until a chunk is there, or the window has room at `room_at` (ns)."""
        box, end = self._boxes[member], time.monotonic() + self._timeout
        with box.changed:
            while True:
                if self._lost:
                    raise PeerLost(
                        f"member {member} of a ring waits for chunk {came}, and another part of the run failed"
                    )
                moments = [chunk.due for chunk in box.waiting[:1]] + ([] if room_at is None else [room_at])
                left = (min(moments) - time.perf_counter_ns()) / 1e9 if moments else end - time.monotonic()
                if left <= 0:
                    if moments:
                        return
                    raise DeadlineExceeded(f"member {member} of a ring waited {self._timeout:g} s for chunk {came}")
                box.changed.wait(left)
