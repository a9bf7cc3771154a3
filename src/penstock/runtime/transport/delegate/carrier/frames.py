"""What ranks and delegates tell one another, the sockets that carry it, and the memory where messages lie.

    rank      SEND 1 .. SEND 1, more                                    (of the other rank)  MESSAGE 1 .. FREE
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
AHEAD = 16 << 10
"""Bytes read at once where frames are to come: a small chunk is most often among them."""
ALIGN = 64
"""The payload begins at a multiple of this after the spec, in memory and on the wire."""


class DescriptorKind(IntEnum):
    """What a descriptor tells."""

    # From a rank to its delegate.
    SEND = 1
    """The first `filled` bytes of message `number` to `target` lie in a slot. Told again when there are more."""
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
    """A lane's connection stands. `tag`: the number of its path."""
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
        tag, stamp: which message of which step it is to the ranks.
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
    stamp: int = 0
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
        """What `to_bytes` made. Raises OSError: the bytes are no frame."""
        magic, kind, *rest = _FRAME.unpack(data)
        if magic != _MAGIC or kind not in _KINDS:
            raise OSError(errno.EPROTO, f"a frame that starts with {magic!r}, of kind {kind}")
        return cls(DescriptorKind(kind), *rest)


_MAGIC, _KINDS = b"PNSK", frozenset(map(int, DescriptorKind))
_FRAME = struct.Struct(f"<4s{len(Descriptor._fields)}q")
FRAME_BYTES = _FRAME.size


def spec_room(spec_bytes: int) -> int:
    """Bytes from the start of a body to its payload."""
    return -(-spec_bytes // ALIGN) * ALIGN


def frames(came: bytearray) -> Iterator[Descriptor]:
    """Takes the frames that bytes begin with from them. Raises OSError: they are none."""
    while len(came) >= FRAME_BYTES:
        frame = Descriptor.from_bytes(came[:FRAME_BYTES])
        del came[:FRAME_BYTES]
        yield frame


PAGE = 4096


class Slots:
    """Gives out parts of a shared memory to messages, the first that fits; neighbours that are free are joined.

    Args:
        limit: bytes that several messages may take together, and may be changed. span: bytes that are mapped.
    """

    def __init__(self, limit: int, span: int) -> None:
        self.limit, self.used = limit, 0
        self._free: list[tuple[int, int]] = [(0, span)]

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Offset and capacity of a slot for so many bytes; None where none is free within the limit. A message above
        the limit gets a slot once no other slot is taken.
        """
        capacity = max(1, -(-num_bytes // PAGE)) * PAGE
        if self.used and self.used + capacity > self.limit:
            return None
        place = next((place for place, (_, size) in enumerate(self._free) if size >= capacity), None)
        if place is None:
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


READ, WRITE, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class EventLoop:
    """One epoll: calls the handlers of descriptors that are ready, and in between asks what is due."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def watch(self, descriptor: int, mask: int, handler: Callable[[int], None]) -> None:
        self.epoll.register(descriptor, mask)
        self._handlers[descriptor] = handler

    def forget(self, descriptor: int) -> None:
        """To be called before the descriptor is closed."""
        self.epoll.unregister(descriptor)
        del self._handlers[descriptor]

    def run(self, turn: Callable[[int], int]) -> None:
        """Runs until the process ends. `turn(now)` does what is due, and returns when to call it again at the latest.

        A handler may be called once too often, for a descriptor that was closed and opened again in the same round.
        """
        while True:
            left = turn(time.perf_counter_ns()) - time.perf_counter_ns()
            for descriptor, mask in self.epoll.poll(max(0, left) / 1e9):
                if descriptor in self._handlers:
                    self._handlers[descriptor](mask)


MOST_PARTS = 16
"""Queued parts that one call of the system takes."""


class SocketStream:
    """A socket that is connected, or connects, with a queue of bytes that are yet to be written.

    Args:
        ready: called with a mask when there is something to read or queued bytes were written, at first when the
            connection stands. It may raise OSError, which ends the connection.
        lost: called with the error that ended the connection, which is closed by then.
    """

    def __init__(
        self, loop: EventLoop, made: socket.socket, ready: Callable[[int], None], lost: Callable[[int], None]
    ) -> None:
        made.setblocking(False)
        self.socket, self._loop, self._ready, self._lost = made, loop, ready, lost
        self.is_open = self._reading = True
        self._queue: deque[memoryview] = deque()
        self._mask = READ | WRITE
        loop.watch(made.fileno(), self._mask, self._on_ready)

    @property
    def is_sent(self) -> bool:
        """Whether the connection stands, and nothing is queued."""
        return self.is_open and not self._queue

    def put(self, *parts: bytes | memoryview) -> None:
        """Queues parts, and sends what can be sent."""
        if self.is_open:
            self._queue.extend(map(memoryview, parts))
            self.guard(self._flush)

    def receive(self) -> bytes:
        """Bytes that came. Raises OSError: none have, or the other end has closed the connection."""
        data = self.socket.recv(AHEAD)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return data

    def guard(self, act: Callable[[], None]) -> None:
        """Calls a function that reads or writes. An error of it ends the connection."""
        try:
            if self.is_open:
                act()
        except BlockingIOError:
            pass
        except OSError as error:
            if self.is_open:
                self.close()
                self._lost(error.errno or errno.ECONNRESET)

    def read(self, reading: bool) -> None:
        """Whether to be called when there is something to read."""
        self._reading = reading
        self._watch()

    def close(self) -> None:
        """Ends it at once: bytes that are queued, or were not read by the other end, do not go."""
        if self.is_open:
            self.is_open = False
            self._loop.forget(self.socket.fileno())
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()
            self._queue.clear()

    def _on_ready(self, mask: int) -> None:
        self.guard(self._flush)
        self.guard(lambda: self._ready(mask))

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._queue:
                sent = self.socket.sendmsg(islice(self._queue, MOST_PARTS))
                while self._queue and sent >= len(self._queue[0]):
                    sent -= len(self._queue.popleft())
                if sent:
                    self._queue[0] = self._queue[0][sent:]
        self._watch()

    def _watch(self) -> None:
        mask = (READ if self._reading else 0) | (WRITE if self._queue else 0)
        if mask != self._mask:
            self._mask = mask
            self._loop.epoll.modify(self.socket.fileno(), mask)


SEND_BUFFER = 4 << 20
_BIND_ADDRESS_NO_PORT = 24


def begin_connect(ours: str, theirs: tuple[str, int]) -> socket.socket:
    """Starts to connect from one of our addresses. Raises OSError: it failed at once."""
    made = socket.socket(socket.AF_INET6 if ":" in theirs[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    """Whether the network has acknowledged nothing of what was to be sent for longer than `least_ms`, or four round
    trips.

    Bytes that the kernel could not send at all count too, as where an interface has no carrier. A process that stands
    still is told from a dead network: its kernel acknowledges, and when its buffer is full, it has no window for what
    is not sent. The kernel's own limit (TCP_USER_TIMEOUT) was seen not to end a connection with thousands of packets
    unacknowledged.
    """
    try:  # before Linux 5.4 it tells less, and nothing of a window
        info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232).ljust(232, b"\0")
    except OSError:
        return False  # the connection is gone: whoever reads from it next will see
    at = (24, 56, 68, 144, 16, 228)
    unacked, last_ack_ms, round_trip_us, unsent, segment, window = (struct.unpack_from("=I", info, n)[0] for n in at)
    late = last_ack_ms > max(least_ms, 4 * round_trip_us // 1000)
    return late and (unacked > 0 or (unsent > 0 and window >= segment))


RESETS = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
"""Errors by which the other end ended a connection, not the network."""
