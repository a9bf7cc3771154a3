"""Where a rank sleeps until something happens. Its transport's threads put events in, and the rank takes them out.

    a thread a channel ----put----> +-------+
    acknowledgements   ----put----> | Inbox | ----wait----> the rank: event() -> the edges that came in
                                    +-------+ ---fileno---> to wait for it beside other things

An event is a function that the rank calls in its own thread. It records what happened and returns the edges whose
messages came in (none, if it says that a full channel has room again), or raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from penstock.runtime.tensors.message import Edge

ArrivalEvent = Callable[[], list[Edge]]
FINELY, BRIEFLY = 0.002, 0.0001
"""Seconds before a given moment from which a rank that polls descriptors sleeps in small pieces, and how long these
are: the system's poll counts milliseconds."""
THREADS_WAIT = 50
"""How many times as long as the rank a thread waits. The rank may compute for long before it wants the message; when
it waits, its own deadline counts, and a peer that is gone ends both waits at once."""


class Inbox:
    """Events of one rank. `put` and `fail` may be called from any thread, the rest from the rank's own."""

    def __init__(self) -> None:
        self._events: SimpleQueue[ArrivalEvent] = SimpleQueue()
        self._descriptor: int | None = None

    def put(self, event: ArrivalEvent) -> None:
        self._events.put(event)
        if self._descriptor is not None:
            os.eventfd_write(self._descriptor, 1)

    def fail(self, error: BaseException) -> None:
        """Puts in what is to be raised where the rank waits."""

        def raise_error() -> list[Edge]:
            raise error

        self.put(raise_error)

    def poll(self) -> list[Edge] | None:
        """What came in by now, perhaps nothing; None where nothing happened at all. What is to be raised is raised by
        the next call, where edges came in before it.
        """
        if self._descriptor is not None:
            with suppress(BlockingIOError):  # before the events: what is put in from now on is told again
                os.eventfd_read(self._descriptor)
        edges: list[Edge] | None = None
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return edges
            try:
                edges = (edges or []) + event()
            except BaseException as error:
                if not edges:
                    raise
                self.fail(error)
                return edges

    def wait(self, timeout: float) -> list[Edge]:
        """Takes the next event; the edges that it brought, perhaps none.

        Raises:
            queue.Empty: nothing happened for `timeout` seconds.
        """
        return self._events.get(timeout=timeout)()

    def fileno(self) -> int:
        """A descriptor (of Linux) that is ready to be read when something happened, until `poll` was called."""
        if self._descriptor is None:
            self._descriptor = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._descriptor

    def close(self) -> None:
        """Gives the descriptor back. Nothing is put in any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
