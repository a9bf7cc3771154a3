"""What a delegate is told and tells, of a message or a connection: descriptors, over rings and over connections.

    rank      ring: SEND 1, SEND 2
    sender    HELLO epoch .......... DATA 1 | spec | payload   DATA 2 | spec | payload   PING
    receiver  ..... WELCOME last ............... ANSWER 1 ........ ANSWER 2 ............ PONG
    rank                                        ring: MESSAGE 1   MESSAGE 2

Over a connection each goes as a frame: a few bytes that tell it from other data, and the descriptor. A body follows
DATA, which says which lane and message it is, so that no announcement travels apart from what it announces.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple

MAGIC = b"PNSK"
_DESCRIPTOR = struct.Struct("<BBBxHHIQqqqqqQQQQ")
DESCRIPTOR_BYTES = _DESCRIPTOR.size
FRAME_BYTES = len(MAGIC) + DESCRIPTOR_BYTES
ALIGN = 64
"""The payload begins at a multiple of this after the spec, in memory and on the wire."""


class FrameError(Exception):
    """Bytes that no delegate of ours sends."""


class Lane(NamedTuple):
    """One stream of numbered messages.

    Attributes:
        source, target: ranks.
        kind: 0 forward, 1 backward.
        place: which of the delegates of that kind carries it.
    """

    source: int
    target: int
    kind: int
    place: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {('forward', 'backward')[self.kind]} {self.place}"


class DescriptorKind(IntEnum):
    """What a descriptor tells."""

    # From a rank to a delegate.
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

    # From one delegate to another.
    HELLO = 30
    """A connection begins. `number`: its epoch; `tag`: the key of the run."""
    WELCOME = 31
    """The answer. `number`: the last message of the lane that the receiver has whole."""
    DATA = 32
    """Message `number` of a lane follows."""
    ANSWER = 33
    """`number`: the last message that the receiver has whole."""
    PING = 34
    PONG = 35
    FULL = 36
    """No room for the message that comes in: the connection stands still and lives. Said again and again."""
    ROOM = 37
    """There is room again."""

    # From a delegate to another rank, and from that to its own delegates.
    THEIRS_DOWN = 40
    """Interface `number` of the lane's target is down. `tag`: the key of the run."""

    # From a delegate to its rank.
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
        number: of the message in its lane, from 1, or what the kind says.
        tag, step, digest: which message it is to the ranks.
        sent: when its rank handed it over, in nanoseconds of the sender's monotonic clock.
        start: in: when there was room for it.
        arrived: when its last byte was there (ns of the monotonic clock).
        offset, capacity: of its slot, in the memory of who tells.
        spec_bytes, payload_bytes: what it carries.
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

    @property
    def body_bytes(self) -> int:
        return body_bytes(self.spec_bytes, self.payload_bytes)

    def write(self, memory: mmap | bytearray, at: int) -> None:
        """Writes it into `DESCRIPTOR_BYTES` bytes."""
        kind, (source, target, direction, place), number, tag, step, digest, *rest = self
        _DESCRIPTOR.pack_into(memory, at, kind, direction, place, source, target, digest, number, tag, step, *rest)

    @classmethod
    def read(cls, memory: mmap | bytes | bytearray, at: int) -> Descriptor:
        """What `write` wrote. Raises ValueError: it is of no kind that there is."""
        kind, direction, place, source, target, digest, number, tag, step, *rest = _DESCRIPTOR.unpack_from(memory, at)
        lane = Lane(source, target, direction, place)
        return cls(DescriptorKind(kind), lane, number, tag, step, digest, *rest)

    def frame(self) -> bytes:
        """Its `FRAME_BYTES` bytes on a connection."""
        data = bytearray(FRAME_BYTES)
        data[: len(MAGIC)] = MAGIC
        self.write(data, len(MAGIC))
        return bytes(data)

    @classmethod
    def of_frame(cls, data: bytes | bytearray) -> Descriptor:
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
