"""Messages between ranks of one process. They are handed over without a copy; each rank has a mailbox.

If ranks are threads, a rank that waits sleeps until something is put into its mailbox. If they take turns in one
thread, what drives them waits (see `run_local`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord, Transport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions, sleep_until


class Envelope(NamedTuple):
    """A message in a mailbox, of one of its sender's steps."""

    step: int
    edge: Edge
    payload: Payload


class Mailbox:
    """What was sent to one rank, in the order in which it was sent."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Envelope] = deque()
        self.lost: int | None = None
        self.woken = False

    def wake(self) -> None:
        """Ends its owner's wait, or the next one."""
        with self.changed:
            self.woken = True
            self.changed.notify()

    def put(self, envelope: Envelope) -> None:
        with self.changed:
            self.waiting.append(envelope)
            self.changed.notify()

    def lose(self, rank: int) -> None:
        """Lets the owner know that another rank failed."""
        with self.changed:
            self.lost = rank
            self.changed.notify()


class LoopbackTransport:
    """One rank's end.

    Args:
        boxes: everyone's, by rank.
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, boxes: Sequence[Mailbox], rank: int, timeout: float = 0.0) -> None:
        self.rank = rank
        self._boxes, self._own, self._timeout = boxes, boxes[rank], timeout
        self._step = 0
        self._came: dict[Edge, Payload] = {}
        self._early: list[Envelope] = []

    def begin(self, step: StepMessages) -> None:
        """Starts a step: what others sent for it meanwhile is let in. What it expects makes no difference here."""
        self._step += 1
        self._own.waiting.extendleft(reversed(self._early))
        self._early.clear()

    def end(self) -> None:
        """Ends a step. What was sent is in its receiver's mailbox already."""

    def close(self) -> None:
        """Nothing is left behind."""

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        self._boxes[target].put(Envelope(self._step, edge, payload))
        return True

    def arrivals(self) -> list[Edge]:
        came: list[Edge] = []
        waiting = self._own.waiting
        while waiting:  # appended to by other threads alone
            envelope = waiting.popleft()
            if envelope.step != self._step:  # its sender has begun the next step already
                self._early.append(envelope)
                continue
            self._came[envelope.edge] = envelope.payload
            came.append(envelope.edge)
        return came

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        box, end = self._own, time.monotonic() + self._timeout
        with box.changed:
            while True:
                came = self.arrivals()
                if came or box.woken:
                    box.woken = False
                    return came
                if box.lost is not None:
                    raise PeerLost(f"rank {box.lost} failed; {who()}")
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}")
                if until is not None:
                    soon = (until - time.perf_counter_ns()) / 1e9
                    if soon <= 0:
                        return []
                    left = min(left, soon)
                box.changed.wait(left)

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._own.wake()

    def take(self, edge: Edge) -> Payload:
        return self._came.pop(edge)

    def crossings(self) -> list[TransferRecord]:
        """None: what is handed over crosses no link."""
        return []


def loopback_ends(
    boxes: Sequence[Mailbox], conditions: Conditions, timeout: float = 0.0, depth: int | None = None
) -> list[ConditionedTransport]:
    """The ends of ranks of one process, by rank. For `depth` see `ConditionedTransport`."""
    return [
        ConditionedTransport(LoopbackTransport(boxes, rank, timeout), conditions, depth=depth, hands_over=True)
        for rank in range(len(boxes))
    ]


class OnTheWay:
    """The messages between ranks of one process, which take turns in one thread, that were sent and have not come.

    Args:
        ends: those of the ranks, where links have conditions; without, what is sent is there at once.
    """

    def __init__(self, ends: Sequence[ConditionedTransport] = ()) -> None:
        self._ends = ends

    def wait_for_first(self) -> bool:
        """Waits for the first to come; False where there is none."""
        return self._wait(min)

    def wait_for_all(self) -> bool:
        """Waits for all to come; False where there is none."""
        return self._wait(max)

    def _wait(self, which: Callable[[Sequence[int]], int]) -> bool:
        if not (dues := [due for end in self._ends for due in end.dues()]):
            return False
        sleep_until(which(dues))
        return True


def local_transports(num_ranks: int, conditions: Conditions | None) -> tuple[Callable[[int], Transport], OnTheWay]:
    """What makes the ends of one step's ranks, which take turns in one thread, and the messages between them."""
    boxes = [Mailbox() for _ in range(num_ranks)]
    if conditions is None:
        return lambda rank: LoopbackTransport(boxes, rank), OnTheWay()
    ends = loopback_ends(boxes, conditions)
    return ends.__getitem__, OnTheWay(ends)
