"""A connection that stands: what is queued goes as the socket takes it, and reading may pause."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from . import sockets
from .event_loop import READ, WRITE, Loop

MOST_PARTS = 16
"""Queued parts that one call of the system takes."""


class SocketStream:
    """Args:
    made: a connected socket; ready: called when there is something to read, or to write.

    Attributes:
        queued: bytes not yet taken by the socket; spoke: when it last took some.
    """

    def __init__(self, loop: Loop, made: socket.socket, ready: Callable[[int], None]) -> None:
        self.socket = made
        self.queued = 0
        self.spoke = time.perf_counter_ns()
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
        for part in parts:
            self._queue.append(memoryview(part))
            self.queued += len(part)
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent. Raises OSError: the connection is gone."""
        while self._queue:
            try:
                sent = self.socket.sendmsg([self._queue[place] for place in range(min(MOST_PARTS, len(self._queue)))])
            except BlockingIOError:
                break
            self.spoke = time.perf_counter_ns()
            self.queued -= sent
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
        sockets.close(self.socket)
        self._queue.clear()

    def _watch(self) -> None:
        mask = (READ if self._reading else 0) | (WRITE if self._queue else 0)
        if mask != self._mask:
            self._mask = mask
            self._loop.change(self.socket.fileno(), mask)
