"""Where a rank sleeps until something happens: its transports' threads put events in, the rank takes them out.

    a thread a channel ----put----> +-------+
    acknowledgements   ----put----> | Inbox | ----wait----> the rank: event() -> the edges that came in
    delegates' reader  ----put----> +-------+

An event is a function that the rank calls in its own thread: it takes note of what happened and returns the edges
whose messages came in (none where a full channel has room again), or raises. Transports that share an inbox are
waited for at once, in the order in which things happen.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from penstock.runtime.message import Edge

Event = Callable[[], list[Edge]]


class Inbox:
    """Events of one rank. `put` may be called from any thread, the rest from the rank's own."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()

    def put(self, event: Event) -> None:
        self._events.put(event)

    def fail(self, error: BaseException) -> None:
        """Puts in what is to be raised where the rank waits."""

        def raise_error() -> list[Edge]:
            raise error

        self._events.put(raise_error)

    def arrivals(self) -> list[Edge]:
        """What came in by now."""
        edges: list[Edge] = []
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return edges
            edges += event()

    def wait(self, timeout: float) -> list[Edge]:
        """Takes the next event; the edges that it brought, perhaps none.

        Raises:
            queue.Empty: nothing happened for `timeout` seconds.
        """
        return self._events.get(timeout=timeout)()
