"""What goes over a connection between two delegates: frames, each a header of fixed size and, with data, a body.

    sender    HELLO epoch .......... DATA 1 | spec | payload   DATA 2 | spec | payload   PING
    receiver  ..... WELCOME last ............... ANSWER 1 ........ ANSWER 2 ............ PONG

The header says which lane and message it is, so that no announcement travels apart from what it announces.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"PNSK"
_HEADER = struct.Struct("<4sBBBxHHIQqqqIxxxxQ")
HEADER_BYTES = _HEADER.size
ALIGN = 64
"""The payload begins at a multiple of this after the spec, in memory and on the wire."""


class FrameError(Exception):
    """Bytes that no delegate of ours sends."""


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """A connection begins. `number`: its epoch; `tag`: the key of the run."""
    WELCOME = 2
    """The answer. `number`: the last message of the lane that the receiver has whole."""
    DATA = 3
    ANSWER = 4
    """`number`: the last message that the receiver has whole."""
    PING = 5
    PONG = 6
    FULL = 7
    """No room for the message that comes in: the connection stands still and lives. Said again and again."""
    ROOM = 8
    """There is room again."""
    DOWN = 9
    """`number`: the place of an interface of the lane's target that is down. Only to sockets that show presence."""


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


class Frame(NamedTuple):
    """A header.

    Attributes:
        number: of the message in its lane, from 1, or what the kind says.
        tag, step, digest: which message it is to the ranks.
        sent: when its rank handed it over, in nanoseconds of the sender's monotonic clock.
        spec_bytes, payload_bytes: what follows.
    """

    kind: FrameKind
    lane: Lane
    number: int = 0
    tag: int = 0
    step: int = 0
    digest: int = 0
    sent: int = 0
    spec_bytes: int = 0
    payload_bytes: int = 0

    @property
    def body_bytes(self) -> int:
        return body_bytes(self.spec_bytes, self.payload_bytes)


def spec_room(spec_bytes: int) -> int:
    """Bytes from the start of a body to its payload."""
    return -(-spec_bytes // ALIGN) * ALIGN


def body_bytes(spec_bytes: int, payload_bytes: int) -> int:
    """Bytes of spec, padding and payload."""
    return spec_room(spec_bytes) + payload_bytes


def pack(frame: Frame) -> bytes:
    """The header's bytes."""
    kind, (source, target, direction, place), number, tag, step, digest, sent, spec, payload = frame
    return _HEADER.pack(MAGIC, kind, direction, place, source, target, digest, number, tag, step, sent, spec, payload)


def unpack(data: bytes | bytearray | memoryview) -> Frame:
    """The header in `HEADER_BYTES` bytes.

    Raises:
        FrameError: it is none.
    """
    magic, kind, direction, place, source, target, digest, number, tag, step, sent, spec, payload = _HEADER.unpack(
        data
    )
    if magic != MAGIC:
        raise FrameError(f"a frame that starts with {magic!r}")
    try:
        known = FrameKind(kind)
    except ValueError:
        raise FrameError(f"a frame of kind {kind}") from None
    return Frame(known, Lane(source, target, direction, place), number, tag, step, digest, sent, spec, payload)
