"""What ranks and delegates tell one another, the sockets that carry it, and the memory where messages lie.

    rank      SEND 1 .. FILLED 1                                        (of the other rank)  MESSAGE 1 .. FREE
    sender    HELLO ......... CHUNK 1, first half | bytes      CHUNK 1, second half | bytes      PING
    receiver  ..... ANSWER 0 ............... ANSWER 1 ............... ANSWER 2 .................. ANSWER 2

Each `Descriptor` goes as a frame of `FRAME_BYTES` bytes: over a pair of sockets from a rank to its delegate, over TCP
from delegate to delegate. The bytes of a chunk follow CHUNK, which says of which message they are and where in it, so
that any connection may carry any chunk.

Messages lie in `Slots` of memory that a rank and its delegate map. One of the two gives the slots out, and knows
which parts are free.

    0        64K       192K            limit        span
    |##taken##|  free   |##taken##| free |   (later)  |

The memory is sparse: parts that were never used take no pages. `limit` is how much may be used, `span` is mapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

MS = 1_000_000
"""Nanoseconds of a millisecond. Moments are nanoseconds of the monotonic clock."""
BEAT = 250 * MS
"""How often a connection on which nothing comes is asked whether it lives."""
UNACKNOWLEDGED_MS = 500
"""Milliseconds for which the network may leave bytes unacknowledged before a connection counts as dead."""
ALIGN = 64
"""The payload begins at a multiple of this after the spec, in memory and on the wire."""


class DescriptorKind(IntEnum):
    """What a descriptor tells."""

    # From a rank to its delegate.
    SEND = 1
    """Message `number` to `target` lies in a slot, or is being written there."""
    FILLED = 2
    """`filled` bytes of message `number` to `target` are in its slot now."""
    FREE = 3
    """A received message was taken: its slot is free."""
    GRANT = 4
    """`number` bytes more may be used for messages that come in."""
    CONNECT = 5
    """Messages will go to `target`, or come from there: connect."""

    # From a delegate to its rank.
    ANSWERED = 10
    """Message `number` to `target` is there, whole."""
    MESSAGE = 11
    """Message `number` of `source` came in, and lies in a slot."""
    CONNECTED = 12
    """A lane's connection stands. `tag`, `step`: the numbers of the interfaces at its ends."""
    LOST = 13
    """A lane's connection went, or did not come about. `number`: the error, 0 where it went to a better path;
    `offset`: how many chunks go once more."""
    STARVED = 14
    """A message of `number` bytes waits for room."""

    # From one delegate to another.
    HELLO = 20
    """A connection begins. `tag`: the key of the run."""
    CHUNK = 21
    """Bytes of message `number` follow: `capacity` of them, which begin at byte `offset` of its body."""
    ANSWER = 22
    """`number`: how many chunks of this connection have come in whole. Answers HELLO and PING, too."""
    PING = 23
    FULL = 24
    """No room for the message that comes in: the connection stands still and lives. Said again and again."""


class Descriptor(NamedTuple):
    """What is told, and of which message or connection.

    Attributes:
        source, target: ranks. place: which of the connections between them.
        number: of the message from its source to its target, from 1, or as the kind says.
        tag, step, digest: which message it is to the ranks.
        sent: when its rank handed it over.
        start: when there was room for it at the receiver. arrived: when its last byte was there.
        offset, capacity: of its slot, in the memory of the rank that tells or is told; of a chunk: where in the body
            it begins, and its length.
        spec_bytes, payload_bytes: what the message carries.
        filled: how many bytes of its body are in its slot.
        attempt: how often this chunk was given to a connection before.
    """

    kind: DescriptorKind
    source: int = 0
    target: int = 0
    place: int = 0
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
    filled: int = 0
    attempt: int = 0

    @property
    def body_bytes(self) -> int:
        return spec_room(self.spec_bytes) + self.payload_bytes

    def to_bytes(self) -> bytes:
        """Its frame."""
        return _FRAME.pack(_MAGIC, *self)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Descriptor:
        """What `to_bytes` made. Raises ValueError for bytes that are no frame."""
        magic, kind, *rest = _FRAME.unpack(data)
        if magic != _MAGIC:
            raise ValueError(f"a frame that starts with {magic!r}")
        return cls(DescriptorKind(kind), *rest)


_MAGIC = b"PNSK"
_FRAME = struct.Struct(f"<4s{len(Descriptor._fields)}q")
FRAME_BYTES = _FRAME.size


def spec_room(spec_bytes: int) -> int:
    """Bytes from the start of a body to its payload."""
    return -(-spec_bytes // ALIGN) * ALIGN


def frames(came: bytearray) -> Iterator[Descriptor]:
    """Takes the frames that bytes begin with from them. Raises ValueError for bytes that are no frame."""
    while len(came) >= FRAME_BYTES:
        frame = Descriptor.from_bytes(came[:FRAME_BYTES])
        del came[:FRAME_BYTES]
        yield frame


PAGE = 4096


class Slots:
    """Gives out parts of a shared memory to messages: best fit, and neighbours that are free are joined.

    Args:
        limit: bytes that may be taken; `grant` changes it. span: bytes that are mapped.
    """

    def __init__(self, limit: int, span: int) -> None:
        self.limit, self.used = limit, 0
        self._free: list[tuple[int, int]] = [(0, span)]

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Offset and capacity of a slot for so many bytes; None where none is free within the limit."""
        capacity = max(1, -(-num_bytes // PAGE)) * PAGE
        if self.used + capacity > self.limit:
            return None
        # The smallest hole that does. The last one, which was never used, is the last resort.
        last = len(self._free) - 1
        holes = [(place == last, size, place) for place, (_, size) in enumerate(self._free) if size >= capacity]
        if not holes:
            return None
        _, size, place = min(holes)
        offset, _ = self._free.pop(place)
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
        """Raises the limit."""
        self.limit += num_bytes


READ, WRITE, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class EventLoop:
    """One epoll: calls the handlers of descriptors that are ready, and in between asks what is due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._stopped = False

    def watch(self, descriptor: int, mask: int, handler: Callable[[int], None]) -> None:
        self._epoll.register(descriptor, mask)
        self._handlers[descriptor] = handler

    def change(self, descriptor: int, mask: int) -> None:
        self._epoll.modify(descriptor, mask)

    def forget(self, descriptor: int) -> None:
        """To be called before the descriptor is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def run(self, turn: Callable[[int], int]) -> None:
        """Runs until `stop` is called. `turn(now)` does what is due, and returns when to call it again at the latest.

        A handler may be called once too often, for a descriptor that was closed and opened again in the same round.
        """
        while not self._stopped:
            left = turn(time.perf_counter_ns()) - time.perf_counter_ns()
            for descriptor, mask in self._epoll.poll(max(0, left) / 1e9):
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    handler(mask)

    def stop(self) -> None:
        """Has `run` return once something that is watched is ready, or `turn` is due."""
        self._stopped = True

    def close(self) -> None:
        self._epoll.close()


MOST_PARTS = 16
"""Queued parts that one call of the system takes."""


class SocketStream:
    """A socket that is connected, or connects, with a queue of bytes that are yet to be written.

    Args:
        ready: called when there is something to read, or to write.

    Attributes:
        wants_write: whether to be called, too, when more can be written than is queued.
    """

    def __init__(self, loop: EventLoop, made: socket.socket, ready: Callable[[int], None]) -> None:
        self.socket, self._loop = made, loop
        self._queue: deque[memoryview] = deque()
        self._reading, self.wants_write = True, False
        self._mask = READ
        loop.watch(made.fileno(), READ, ready)

    @property
    def is_sent(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    def put(self, *parts: bytes | memoryview) -> None:
        """Queues parts, and sends what can be sent. Raises OSError: the connection is gone."""
        self._queue.extend(map(memoryview, parts))
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent. Raises OSError: the connection is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._queue:
                sent = self.socket.sendmsg(islice(self._queue, MOST_PARTS))
                while self._queue and sent >= len(self._queue[0]):
                    sent -= len(self._queue.popleft())
                if sent:
                    self._queue[0] = self._queue[0][sent:]
        self._watch()

    def read(self, reading: bool) -> None:
        """Whether to be called when there is something to read."""
        self._reading = reading
        self._watch()

    def close(self) -> None:
        """Ends it at once: bytes that are queued, or were not read by the other end, do not go."""
        self._loop.forget(self.socket.fileno())
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        self._queue.clear()

    def _watch(self) -> None:
        mask = (READ if self._reading else 0) | (WRITE if self._queue or self.wants_write else 0)
        if mask != self._mask:
            self._mask = mask
            self._loop.change(self.socket.fileno(), mask)


def tune(made: socket.socket) -> None:
    """Small messages go at once, and nothing blocks."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_BIND_ADDRESS_NO_PORT = 24
SEND_BUFFER = 4 << 20


def begin_connect(ours: str, theirs: tuple[str, int]) -> socket.socket:
    """Starts to connect from one of our addresses. Raises OSError: it failed at once."""
    made = socket.socket(socket.AF_INET6 if ":" in theirs[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        made.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        made.bind((ours, 0))
        if (error := made.connect_ex(theirs)) not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except OSError:
        made.close()
        raise
    return made


def is_unacknowledged(made: socket.socket, least_ms: int = UNACKNOWLEDGED_MS) -> bool:
    """Whether the network has acknowledged nothing of what was sent for longer than `least_ms`, or four round trips.

    The kernel's own limit (TCP_USER_TIMEOUT) was seen not to end a connection with thousands of packets
    unacknowledged. A process that stands still is told from a dead network: its kernel acknowledges, and when its
    buffer is full, nothing is under way.
    """
    try:
        info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except OSError:
        return False  # the connection is gone: whoever reads from it next will see
    unacked, last_ack_ms, round_trip_us = (struct.unpack_from("=I", info, at)[0] for at in (24, 56, 68))
    return unacked > 0 and last_ack_ms > max(least_ms, 4 * round_trip_us // 1000)


RESETS = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
"""Errors by which the other end ended a connection, not the network."""
