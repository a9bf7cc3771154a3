"""What a delegate sleeps in, and for how long: one epoll, woken by descriptors or at a moment, never spinning."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable

MS = 1_000_000

BEAT = 250 * MS
"""A connection on which nothing is sent for so long is asked whether it lives."""
SILENCE = 2_000 * MS
"""A process that lets questions wait for so long, over a connection that stands, is said to stand still."""
UNACKNOWLEDGED_MS = 500
"""Milliseconds for which the network may leave bytes unacknowledged before a connection counts as dead."""
CONNECT = 1_000 * MS
WELCOME = 2_000 * MS
"""Deadlines of the two steps of connecting; they double with each failure."""
LONGEST = 16_000 * MS
PROBE = 500 * MS
"""How often a rank that does not connect is looked for."""


def patience(first: int, failures: int) -> int:
    """A deadline after so many failures in a row."""
    return min(LONGEST, first << min(failures, 8))


READ, WRITE, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class EventLoop:
    """Calls handlers of descriptors that are ready, and in between asks what is due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._forgotten: set[int] = set()

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
        """Runs forever. `turn(now)` does what is due and returns when it wants to be called again at the latest.

        Moments are nanoseconds of the monotonic clock.
        """
        while True:
            ready = self._wait(turn(time.perf_counter_ns()))
            self._forgotten.clear()
            for descriptor, mask in ready:
                handler = self._handlers.get(descriptor)
                # One that was forgotten meanwhile may have a new owner, to whom this is no news.
                if handler is not None and descriptor not in self._forgotten:
                    handler(mask)

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
