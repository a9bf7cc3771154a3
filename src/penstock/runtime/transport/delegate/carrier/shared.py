"""What a rank and its delegates share: rings of descriptors, and memory whose slots messages lie in.

A ring goes from one process to another: one writes, one reads, nobody locks.

    | written | read | descriptor | descriptor | ...      written - read: how many wait to be read

A descriptor is there before `written` counts it, so that a process killed at any moment leaves a sound ring. The
wake-up is an eventfd beside it: a write to it and a read of it also order the memory of both processes.

Which parts of a memory are taken knows whoever gives them out: a list of what is free, best fit, neighbours joined
again.

    0        64K       192K            limit        span
    |##taken##|  free   |##taken##| free |   (later)  |

The memory itself is sparse: what was never used takes no pages. `limit` is what may be used, `span` what is mapped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from mmap import mmap

from .descriptor import DESCRIPTOR_BYTES, Descriptor

_WORDS = 16  # 64-bit words before the first descriptor: each count on a cache line of its own
SIZE = -(-DESCRIPTOR_BYTES // 64) * 64
DEPTH = 512
"""Descriptors in a ring."""
RING_BYTES = _WORDS * 8 + DEPTH * SIZE


class DescriptorRing:
    """One end of a ring; the process uses it either to put or to take.

    Args:
        memory: a shared mapping; start: where in it the ring begins, a multiple of 64.
    """

    def __init__(self, memory: mmap, start: int) -> None:
        self._memory = memory
        self._start = start + _WORDS * 8
        self._counts = memoryview(memory)[start : start + _WORDS * 8].cast("Q")

    def __len__(self) -> int:
        """How many descriptors wait to be read."""
        return self._counts[0] - self._counts[8]

    def put(self, descriptor: Descriptor) -> bool:
        """Writes a descriptor; False where the ring is full."""
        written = self._counts[0]
        if written - self._counts[8] >= DEPTH:
            return False
        descriptor.write(self._memory, self._start + written % DEPTH * SIZE)
        self._counts[0] = written + 1
        return True

    def take(self) -> Descriptor | None:
        """Reads the next descriptor; None where there is none."""
        read = self._counts[8]
        if read == self._counts[0]:
            return None
        descriptor = Descriptor.read(self._memory, self._start + read % DEPTH * SIZE)
        self._counts[8] = read + 1
        return descriptor

    def close(self) -> None:
        """Lets go of the mapping."""
        self._counts.release()


PAGE = 4096


def rounded(num_bytes: int) -> int:
    """The capacity of a slot for so many bytes: whole pages."""
    return max(1, -(-num_bytes // PAGE)) * PAGE


class Slots:
    """Allots parts of a shared memory to messages.

    Args:
        limit: bytes that may be taken; changes by `grant`. More than `span` can't be.
        taken: (offset, capacity) of slots that are taken from the start.
    """

    def __init__(self, limit: int, span: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.limit, self.span = limit, span
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, span)]
        for offset, capacity in sorted(taken):
            self._cut(next(place for place, (o, c) in enumerate(self._free) if o <= offset < o + c), offset, capacity)

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Offset and capacity of a slot for so many bytes; None where none is free within the limit."""
        capacity = rounded(num_bytes)
        if self.used + capacity > self.limit:
            return None
        # The smallest hole that does; the last one, which was never used, is the last resort.
        holes = [(size, place) for place, (_, size) in enumerate(self._free[:-1]) if size >= capacity]
        if holes:
            place = min(holes)[1]
        elif self._free and self._free[-1][1] >= capacity:
            place = len(self._free) - 1
        else:
            return None
        offset = self._free[place][0]
        self._cut(place, offset, capacity)
        return offset, capacity

    def free(self, offset: int, capacity: int) -> None:
        """Gives a slot back."""
        self.used -= capacity
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + capacity:
            capacity += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == offset:
            place -= 1
            offset, before = self._free.pop(place)
            capacity += before
        self._free.insert(place, (offset, capacity))

    def grant(self, num_bytes: int) -> None:
        """Raises the limit, or lowers it again."""
        self.limit += num_bytes

    def _cut(self, place: int, offset: int, capacity: int) -> None:
        start, size = self._free[place]
        parts = [(start, offset - start), (offset + capacity, start + size - offset - capacity)]
        self._free[place : place + 1] = [part for part in parts if part[1]]
        self.used += capacity
