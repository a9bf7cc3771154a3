"""What a delegate is told and tells of messages and connections, the rings for that, and slots for messages.

    rank      ring: SEND 1
    sender    HELLO ......... CHUNK 1, first half | bytes      CHUNK 1, second half | bytes      PING
    receiver  ..... WELCOME ............... ANSWER 1 chunk ............... ANSWER 2 chunks ..... PONG
    rank                                                      ring: MESSAGE 1

Over a connection each `Descriptor` goes as a frame: a few bytes that tell it from other data, and the descriptor. The
bytes of a chunk follow CHUNK, which says of which message they are and where in it, so that any connection may carry
any chunk.

A `DescriptorRing` goes from one process to another: one writes, one reads, nobody locks.

    | written | read | descriptor | descriptor | ...      written - read: how many wait to be read

A descriptor is there before `written` counts it, so that a process killed at any moment leaves a sound ring. The
wake-up is an eventfd beside it: a write to it and a read of it also order the memory of both processes.

Messages lie in `Slots` of memory that both processes map. Which parts are taken knows whoever gives them out: a list
of what is free, best fit, neighbours joined again.

    0        64K       192K            limit        span
    |##taken##|  free   |##taken##| free |   (later)  |

The memory itself is sparse: what was never used takes no pages. `limit` is what may be used, `span` what is mapped.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple

MAGIC = b"PNSK"
_DESCRIPTOR = struct.Struct("<BBHHHIQqqqqqQQQQ")
DESCRIPTOR_BYTES = _DESCRIPTOR.size
FRAME_BYTES = len(MAGIC) + DESCRIPTOR_BYTES
ALIGN = 64
"""The payload begins at a multiple of this after the spec, in memory and on the wire."""


class FrameError(Exception):
    """Bytes that no delegate of ours sends."""


class Lane(NamedTuple):
    """One of the connections from a rank to another.

    Attributes:
        source, target: ranks.
        place: which of the connections.
    """

    source: int
    target: int
    place: int = 0

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


class DescriptorKind(IntEnum):
    """What a descriptor tells."""

    # From a rank to its delegate.
    SEND = 1
    """Message `number` to the lane's target lies in a slot, or is being written there."""
    FREE = 2
    """A received message was taken: its slot is free. `number` bytes of what was granted end."""
    GRANT = 3
    """`number` bytes more may be used for messages that come in."""
    CONNECT = 4
    """Messages will go to the lane's target, or come from there: connect."""

    # From a rank's delegate to its rank.
    ANSWERED = 10
    """Message `number` to the lane's target is there, whole."""
    MESSAGE = 11
    """Message `number` of the lane's source came in, and lies in a slot."""
    CONNECTED = 12
    """A lane's connection stands. `tag`, `step`: the interfaces at its ends."""
    CUT = 13
    """A lane's connection went. `tag`, `step`: as above; `number`: why, a `CloseReason`; `offset`: how many chunks go
    once more."""
    REFUSED = 14
    """Nobody listens where the other rank's delegate listened: it has ended."""
    NO_WAY = 15
    """No interface reaches the other rank just now. `number`: why the last one tried did not, a `CloseReason`."""
    SILENT = 16
    """A connection stands and the process at its other end says nothing."""
    HEARD = 17
    """It said something again."""
    STARVED = 18
    """A message of `number` bytes waits for room."""
    DOUBLED = 19
    """A chunk came twice, and was dropped."""

    # From one delegate to another.
    HELLO = 30
    """A connection begins. `tag`: the key of the run."""
    WELCOME = 31
    """The answer."""
    CHUNK = 32
    """Bytes of message `number` follow: `capacity` of them, which begin at byte `offset` of its body."""
    ANSWER = 33
    """`number`: how many chunks of this connection have come in whole."""
    PING = 34
    PONG = 35
    FULL = 36
    """No room for the message that comes in: the connection stands still and lives. Said again and again."""
    ROOM = 37
    """There is room again."""
    DOWN = 38
    """Interface `number` of the sender is down: connections to it are dead."""


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
        number: of the message from its source to its target, from 1, or what the kind says.
        tag, step, digest: which message it is to the ranks.
        sent: when its rank handed it over, in nanoseconds of the sender's monotonic clock.
        start: in: when there was room for it.
        arrived: when its last byte was there (ns of the monotonic clock).
        offset, capacity: of its slot, in the memory of who tells; of a chunk: where in the body, and how long.
        spec_bytes, payload_bytes: what it carries.
        attempt: how often this chunk was given to a connection before.
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
    attempt: int = 0

    @property
    def body_bytes(self) -> int:
        return body_bytes(self.spec_bytes, self.payload_bytes)

    def write(self, memory: mmap | bytearray, at: int) -> None:
        """Writes it into `DESCRIPTOR_BYTES` bytes."""
        kind, (source, target, place), number, tag, step, digest, *rest, attempt = self
        _DESCRIPTOR.pack_into(memory, at, kind, place, attempt, source, target, digest, number, tag, step, *rest)

    @classmethod
    def read(cls, memory: mmap | bytes | bytearray | memoryview, at: int) -> Descriptor:
        """What `write` wrote. Raises ValueError: it is of no kind that there is."""
        kind, place, attempt, source, target, digest, number, tag, step, *rest = _DESCRIPTOR.unpack_from(memory, at)
        rest.append(attempt)
        return cls(DescriptorKind(kind), Lane(source, target, place), number, tag, step, digest, *rest)

    def frame(self) -> bytes:
        """Its `FRAME_BYTES` bytes on a connection."""
        data = bytearray(FRAME_BYTES)
        data[: len(MAGIC)] = MAGIC
        self.write(data, len(MAGIC))
        return bytes(data)

    @classmethod
    def of_frame(cls, data: bytes | bytearray | memoryview) -> Descriptor:
        """What `frame` made. Raises FrameError: it did not."""
        magic = bytes(data[: len(MAGIC)])
        if magic != MAGIC:
            raise FrameError(f"a frame that starts with {magic!r}")
        try:
            return cls.read(data, len(MAGIC))
        except ValueError:
            raise FrameError(f"a frame of kind {data[len(MAGIC)]}") from None


def spec_room(spec_bytes: int) -> int:
    """Bytes from the start of a body to its payload."""
    return -(-spec_bytes // ALIGN) * ALIGN


def body_bytes(spec_bytes: int, payload_bytes: int) -> int:
    """Bytes of spec, padding and payload."""
    return spec_room(spec_bytes) + payload_bytes


_WORDS = 16  # 64-bit words before the first descriptor: each count on a cache line of its own
RING_STRIDE = -(-DESCRIPTOR_BYTES // 64) * 64
DEPTH = 512
"""Descriptors in a ring."""
RING_BYTES = _WORDS * 8 + DEPTH * RING_STRIDE


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
        descriptor.write(self._memory, self._start + written % DEPTH * RING_STRIDE)
        self._counts[0] = written + 1
        return True

    def take(self) -> Descriptor | None:
        """Reads the next descriptor; None where there is none."""
        read = self._counts[8]
        if read == self._counts[0]:
            return None
        descriptor = Descriptor.read(self._memory, self._start + read % DEPTH * RING_STRIDE)
        self._counts[8] = read + 1
        return descriptor

    def close(self) -> None:
        """Lets go of the mapping."""
        self._counts.release()


PAGE = 4096
SLOT_HEAD = 64
"""Bytes of an outgoing message's slot before its body: how many bytes of the body the rank has written so far."""


def rounded(num_bytes: int) -> int:
    """The capacity of a slot for so many bytes: whole pages."""
    return max(1, -(-num_bytes // PAGE)) * PAGE


class Slots:
    """Allots parts of a shared memory to messages.

    Args:
        limit: bytes that may be taken; changes by `grant`. More than `span` can't be.
    """

    def __init__(self, limit: int, span: int) -> None:
        self.limit, self.span = limit, span
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, span)]

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
        offset, size = self._free.pop(place)
        if size > capacity:
            self._free.insert(place, (offset + capacity, size - capacity))
        self.used += capacity
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
