"""Messages between ranks that are threads of one process: handed over, no copy, each rank with a mailbox.

A message lies in the mailbox until its time has come (see `conditioned`); a rank that waits sleeps until then.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.message import Edge, Payload
from penstock.runtime.transports.conditioned import Conditions, size_of


class Mailbox:
    """What was sent to one rank, by the time at which it is there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[tuple[int, int, Edge, Payload]] = []
        self.num_sent = 0
        self.lost: int | None = None

    def put(self, due: int, edge: Edge, payload: Payload) -> None:
        with self.changed:
            heapq.heappush(self.waiting, (due, self.num_sent, edge, payload))
            self.num_sent += 1
            self.changed.notify()

    def lose(self, rank: int) -> None:
        """Lets the owner know that another rank failed."""
        with self.changed:
            self.lost = rank
            self.changed.notify()


class MailboxTransport:
    """One rank's end.

    Args:
        boxes: everyone's, by rank.
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, boxes: Sequence[Mailbox], rank: int, conditions: Conditions, timeout: float) -> None:
        self._boxes, self._rank = boxes, rank
        self._conditions, self._timeout = conditions, timeout
        self._came: dict[Edge, Payload] = {}

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        self._boxes[target].put(self._conditions.due(self._rank, target, size_of(payload)), edge, payload)
        return True

    def arrivals(self) -> list[Edge]:
        box = self._boxes[self._rank]
        with box.changed:
            return self._open(box)

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str]) -> list[Edge]:
        """Waits until at least one message has come in.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        box = self._boxes[self._rank]
        end = time.monotonic() + self._timeout
        with box.changed:
            while not (came := self._open(box)):
                if box.lost is not None:
                    raise PeerLost(f"rank {box.lost} failed; {who()}")
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}")
                if box.waiting:
                    left = min(left, max(0.0, (box.waiting[0][0] - time.perf_counter_ns()) / 1e9))
                box.changed.wait(left)
            return came

    def take(self, edge: Edge) -> Payload:
        return self._came.pop(edge)

    def _open(self, box: Mailbox) -> list[Edge]:
        """Takes out what is there by now."""
        now, came = time.perf_counter_ns(), []
        while box.waiting and box.waiting[0][0] <= now:
            _, _, edge, payload = heapq.heappop(box.waiting)
            self._came[edge] = payload
            came.append(edge)
        return came
