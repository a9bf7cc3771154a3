"""A ring of descriptors in shared memory, from one process to another: one writes, one reads, nobody locks.

    | written | read | descriptor | descriptor | ...      written - read: how many wait to be read

A descriptor is there before `written` counts it, so that a process killed at any moment leaves a sound ring. The
wake-up is an eventfd beside it: a write to it and a read of it also order the memory of both processes.
"""

from __future__ import annotations

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
