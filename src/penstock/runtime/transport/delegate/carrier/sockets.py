"""TCP as delegates use it: what they sleep in, what its errors mean, and a connection, while it is made
(`ConnectAttempt`) and when it stands (`SocketStream`).

An `EventLoop` is one epoll, woken by descriptors or at a moment, never spinning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from .descriptor import CloseReason
from .paths import MS, Path

BEAT = 250 * MS
"""A connection on which nothing is sent for so long is asked whether it lives."""
SILENCE = 2_000 * MS
"""A process that lets questions wait for so long, over a connection that stands, is said to stand still."""
UNACKNOWLEDGED_MS = 500
"""Milliseconds for which the network may leave bytes unacknowledged before a connection counts as dead."""
CONNECT = 1_000 * MS
WELCOME = 2_000 * MS
"""Deadlines of the two steps of connecting; they double with each failure, up to `LONGEST`."""
LONGEST = 16_000 * MS


READ, WRITE, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class EventLoop:
    """Calls handlers of descriptors that are ready, and in between asks what is due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._forgotten: set[int] = set()
        self._stopped = False

    def watch(self, descriptor: int, mask: int, handler: Callable[[int], None]) -> None:
        self._epoll.register(descriptor, mask)
        self._handlers[descriptor] = handler

    def change(self, descriptor: int, mask: int) -> None:
        self._epoll.modify(descriptor, mask)

    def forget(self, descriptor: int) -> None:
        """To be called before the descriptor is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._forgotten.add(descriptor)
            self._epoll.unregister(descriptor)

    def run(self, turn: Callable[[int], int]) -> None:
        """Runs until `stop` is called. `turn(now)` does what is due and returns when to call it again at the latest.

        Moments are nanoseconds of the monotonic clock.
        """
        while not self._stopped:
            ready = self._wait(turn(time.perf_counter_ns()))
            self._forgotten.clear()
            for descriptor, mask in ready:
                handler = self._handlers.get(descriptor)
                # One that was forgotten meanwhile may have a new owner, to whom this is no news.
                if handler is not None and descriptor not in self._forgotten:
                    handler(mask)

    def stop(self) -> None:
        """Has `run` return once something that is watched is ready, or `turn` is due."""
        self._stopped = True

    def close(self) -> None:
        self._epoll.close()

    def _wait(self, until: int) -> list[tuple[int, int]]:
        left = until - time.perf_counter_ns()
        # epoll counts whole milliseconds, and rounds up: the last one is slept through.
        ready = self._epoll.poll(max(0, left // MS) / 1000)
        if ready or left >= MS:
            return ready
        if (left := until - time.perf_counter_ns()) > 0:
            time.sleep(left / 1e9)
        return self._epoll.poll(0)


def watch_parent(loop: EventLoop, parent: int, lifeline: int) -> None:
    """Ends this process when its rank ends, however that ends.

    The rank's process descriptor says so even where something that it forked still holds the other end of the
    lifeline; the lifeline says so on kernels without process descriptors, and when the rank lets go of a delegate.
    """

    def end(mask: int) -> None:
        os._exit(0)

    loop.watch(lifeline, READ, end)
    with contextlib.suppress(OSError):
        loop.watch(os.pidfd_open(parent), READ, end)
    if os.getppid() != parent:
        os._exit(0)


SEND_BUFFER = 4 << 20

_MEANING = {
    errno.ECONNREFUSED: CloseReason.REFUSED,
    errno.ETIMEDOUT: CloseReason.TIMED_OUT,
    errno.ECONNRESET: CloseReason.RESET,
    errno.EPIPE: CloseReason.RESET,
    errno.ECONNABORTED: CloseReason.RESET,
    errno.EADDRNOTAVAIL: CloseReason.INTERFACE_DOWN,
    errno.ENETDOWN: CloseReason.INTERFACE_DOWN,
}


def meaning(number: int | None) -> CloseReason:
    """What an error of a socket says."""
    return _MEANING.get(number or 0, CloseReason.UNREACHABLE)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tune(made: socket.socket) -> None:
    """Small messages go at once, and nothing blocks."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def begin_connect(ours: str, theirs: tuple[str, int]) -> socket.socket:
    """Starts to connect from one of our addresses. Raises OSError: it failed at once."""
    made = socket.socket(family_of(theirs[0]), socket.SOCK_STREAM)
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


def close(made: socket.socket) -> None:
    """Closes at once: nothing that was still to be sent is of use."""
    with contextlib.suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    made.close()


def trust(made: socket.socket, stands_still: bool = False) -> None:
    """Ends a connection that stands when the network acknowledges nothing for longer than its round trip asks for.

    One that stands still, since the receiver said that it has no room, may do so forever: to TCP that looks alike.
    """
    try:
        limit = 0 if stands_still else _limit_ms(_info(made))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    except OSError:
        pass  # it is gone: whoever reads from it next will see


def is_unacknowledged(made: socket.socket, least_ms: int = UNACKNOWLEDGED_MS) -> bool:
    """Whether the network has acknowledged nothing of what was sent for longer than `least_ms`, or four round trips.

    The kernel should have ended the connection then, and does not always: it looks when it sends something again, and
    with thousands of packets unacknowledged was seen to do so never. A process that stands still is told from that:
    its kernel acknowledges, and when its buffer is full, nothing is under way.
    """
    try:
        info = _info(made)
    except OSError:
        return False  # it is gone: whoever reads from it next will see
    unacked, last_ack_ms = _number(info, 24), _number(info, 56)  # tcpi_unacked, tcpi_last_ack_recv
    return unacked > 0 and last_ack_ms > _limit_ms(info, least_ms)


def _info(made: socket.socket) -> bytes:
    return made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)


def _number(info: bytes, offset: int) -> int:
    return int.from_bytes(info[offset : offset + 4], "little")


def _limit_ms(info: bytes, least_ms: int = UNACKNOWLEDGED_MS) -> int:
    """Milliseconds for which a round trip of this length allows that nothing is acknowledged."""
    return max(least_ms, 4 * _number(info, 68) // 1000)  # tcpi_rtt, microseconds


_BIND_ADDRESS_NO_PORT = 24
_LINGER_NOT = b"\x01\x00\x00\x00\x00\x00\x00\x00"


class ConnectAttempt:
    """A connection over a path that is being made.

    Args:
        ours: our addresses. theirs: where the other end listens on each of its own.
        deadline: when its maker gives it up, in nanoseconds of the monotonic clock.
        done: called once, by the loop, with the attempt and its error; with 0 where it stands, and its socket is for
            the caller to watch.

    Raises:
        OSError: it failed at once.
    """

    def __init__(
        self,
        loop: EventLoop,
        path: Path,
        ours: Sequence[str],
        theirs: Sequence[tuple[str, int]],
        deadline: int,
        done: Callable[[ConnectAttempt, int], None],
    ) -> None:
        self._loop, self._done = loop, done
        self.path, self.deadline = path, deadline
        self.socket = begin_connect(ours[path.ours], theirs[path.theirs])
        loop.watch(self.socket.fileno(), WRITE, self._ready)

    def _ready(self, mask: int) -> None:
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._loop.forget(self.socket.fileno())
        if error:
            close(self.socket)
        self._done(self, error)

    def close(self) -> None:
        self._loop.forget(self.socket.fileno())
        close(self.socket)


MOST_PARTS = 16
"""Queued parts that one call of the system takes."""


class SocketStream:
    """A connected socket with a queue of bytes that are yet to be written.

    Args:
        made: a connected socket; ready: called when there is something to read, or to write.
    """

    def __init__(self, loop: EventLoop, made: socket.socket, ready: Callable[[int], None]) -> None:
        self.socket = made
        self._loop = loop
        self._queue: deque[memoryview] = deque()
        self._reading = True
        self._mask = READ
        loop.watch(made.fileno(), READ, ready)

    def put(self, *parts: bytes | memoryview) -> None:
        """Queues parts, and sends what can be sent.

        Raises:
            OSError: the connection is gone.
        """
        self._queue.extend(map(memoryview, parts))
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent. Raises OSError: the connection is gone."""
        while self._queue:
            try:
                sent = self.socket.sendmsg([self._queue[place] for place in range(min(MOST_PARTS, len(self._queue)))])
            except BlockingIOError:
                break
            while sent:
                first = self._queue[0]
                if sent < len(first):
                    self._queue[0] = first[sent:]
                    break
                sent -= len(self._queue.popleft())
        self._watch()

    def read(self, reading: bool) -> None:
        """Whether to be called when there is something to read."""
        self._reading = reading
        self._watch()

    def close(self) -> None:
        """Ends it; what is queued does not go."""
        self._loop.forget(self.socket.fileno())
        close(self.socket)
        self._queue.clear()

    def _watch(self) -> None:
        mask = (READ if self._reading else 0) | (WRITE if self._queue else 0)
        if mask != self._mask:
            self._mask = mask
            self._loop.change(self.socket.fileno(), mask)
