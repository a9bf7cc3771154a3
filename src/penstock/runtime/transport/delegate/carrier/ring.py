"""A ring of descriptors in shared memory, from one process to another: one writes, one reads, nobody locks.

    | written | read | descriptor | descriptor | ...      written - read: how many wait to be read

A descriptor is there before `written` counts it, so that a process killed at any moment leaves a sound ring. The
wake-up is an eventfd beside it: a write to it and a read of it also order the memory of both processes.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple

from .frame import Lane

_DESCRIPTOR = struct.Struct("<BBBxHHIQqqqqqQQQQ")
_WORDS = 16  # 64-bit words before the first descriptor: each count on a cache line of its own
SIZE = -(-_DESCRIPTOR.size // 64) * 64
DEPTH = 512
"""Descriptors in a ring."""
RING_BYTES = _WORDS * 8 + DEPTH * SIZE


class DescriptorKind(IntEnum):
    """What a descriptor tells."""

    # To a delegate.
    SEND = 1
    """Message `number` of a lane lies in a slot."""
    FREE = 2
    """A received message was taken: its slot is free. `number` bytes of what was granted end."""
    GRANT = 3
    """`number` bytes more may be used."""
    EXPECT = 4
    """Messages are to come in on a lane: where nobody connects, find out why."""
    CONNECT = 5
    """Messages will go out on a lane, `number` have before: connect."""

    THEIRS_DOWN = 6
    """Interface `tag` of the lane's target is down."""

    # From a delegate.
    ANSWERED = 10
    """All of a lane's messages up to `number` are there, whole."""
    MESSAGE = 11
    """Message `number` of a lane came in, and lies in a slot."""
    CONNECTED = 12
    """A lane's connection stands. `tag`, `step`: the interfaces at its ends; `number`: messages sent again on it."""
    CUT = 13
    """A lane's connection went. `tag`, `step`: as above; `number`: why, a `CloseReason`."""
    REFUSED = 14
    """Nobody listens where the other rank listened: it has ended."""
    SILENT = 15
    """A connection stands and the process at its other end says nothing."""
    HEARD = 16
    """It said something again."""
    STARVED = 17
    """A message of `number` bytes waits for room."""
    DOWN = 18
    """The kernel says that interface `tag` of this rank is down."""
    UP = 19
    """It is up again."""
    DOUBLED = 20
    """A message came twice, and was dropped."""
    NO_WAY = 21
    """No interface reaches the other rank just now. `number`: why the last one tried did not, a `CloseReason`."""


class CloseReason(IntEnum):
    """Why a connection went, or did not come about."""

    CLOSED = 1
    RESET = 2
    TIMED_OUT = 3
    UNREACHABLE = 4
    INTERFACE_DOWN = 5
    REFUSED = 6
    NO_WELCOME = 7
    BETTER_PATH = 8
    BROKEN = 9

    def __str__(self) -> str:
        return _WORDS_FOR[self]


_WORDS_FOR = {
    CloseReason.CLOSED: "the other end closed it",
    CloseReason.RESET: "the other end reset it",
    CloseReason.TIMED_OUT: "nothing came back in time",
    CloseReason.UNREACHABLE: "the network is unreachable",
    CloseReason.INTERFACE_DOWN: "the interface went down",
    CloseReason.REFUSED: "nobody listens there",
    CloseReason.NO_WELCOME: "the other end accepted the connection and said nothing",
    CloseReason.BETTER_PATH: "a better interface is up again",
    CloseReason.BROKEN: "what came was no message of ours",
}


class Descriptor(NamedTuple):
    """What is told, and of which message or connection.

    Attributes:
        number, tag, step, digest, sent, spec_bytes, payload_bytes: as in a frame.
        start: in: when there was room for it.
        arrived: when its last byte was there (ns of the monotonic clock).
        offset, capacity: of its slot.
    """

    kind: DescriptorKind
    lane: Lane
    number: int = 0
    tag: int = 0
    step: int = 0
    digest: int = 0
    sent: int = 0
    start: int = 0
    arrived: int = 0
    offset: int = 0
    capacity: int = 0
    spec_bytes: int = 0
    payload_bytes: int = 0


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
        note, (source, target, kind, place), *rest = descriptor
        number, tag, step, digest, sent, start, arrived, offset, capacity, spec, payload = rest
        _DESCRIPTOR.pack_into(
            self._memory,
            self._start + written % DEPTH * SIZE,
            note,
            kind,
            place,
            source,
            target,
            digest,
            number,
            tag,
            step,
            sent,
            start,
            arrived,
            offset,
            capacity,
            spec,
            payload,
        )
        self._counts[0] = written + 1
        return True

    def take(self) -> Descriptor | None:
        """Reads the next descriptor; None where there is none."""
        read = self._counts[8]
        if read == self._counts[0]:
            return None
        note, kind, place, source, target, digest, number, tag, step, sent, start, arrived, *slot = (
            _DESCRIPTOR.unpack_from(self._memory, self._start + read % DEPTH * SIZE)
        )
        self._counts[8] = read + 1
        lane = Lane(source, target, kind, place)
        return Descriptor(DescriptorKind(note), lane, number, tag, step, digest, sent, start, arrived, *slot)

    def close(self) -> None:
        """Lets go of the mapping."""
        self._counts.release()
