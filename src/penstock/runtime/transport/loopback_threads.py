"""Messages between ranks that are threads of one process: handed over, no copy, each rank with a mailbox.

A message lies in the mailbox until its time has come (see `conditioned`); a rank that waits sleeps until then.

Channels may be bounded, as those of frameworks are: `depth` messages from one rank to another, each from its
sending until it has arrived, and then the sender stands still (`ps.Blocking` in the simulator).

    rank 0    |F0|F1|F2|.......|F3|          depth 2 and a late link: F2's message finds two under way and waits,
    under way    |---F0---|                  and F3, though it is ready, starts only when the first has arrived
                    |---F1---|
                          |---F2---|
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.channel import ExpectedMessages
from penstock.runtime.transport.conditioned import Conditions, size_of
from penstock.runtime.transport.transfer_record import CrossingLog, TransferRecord


class Letter(NamedTuple):
    """A message in a mailbox. Letters sort by when they are there, those of one moment by when they were sent."""

    due: int
    number: int
    step: int
    source: int
    sent: int
    num_bytes: int
    edge: Edge
    payload: Payload


class Mailbox:
    """What was sent to one rank, by the time at which it is there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[Letter] = []
        self.num_sent = 0
        self.lost: int | None = None
        self.woken = False

    def wake(self) -> None:
        """Ends its owner's wait, or the next one."""
        with self.changed:
            self.woken = True
            self.changed.notify()

    def put(self, letter: Letter) -> None:
        with self.changed:
            heapq.heappush(self.waiting, letter._replace(number=self.num_sent))
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
        depth: most messages under way to another rank; None for any number.
        delegated: links, by their two ranks in either order, that have no bound all the same.
    """

    def __init__(
        self,
        boxes: Sequence[Mailbox],
        rank: int,
        conditions: Conditions,
        timeout: float,
        depth: int | None = None,
        delegated: Collection[tuple[int, int]] = (),
    ) -> None:
        self._boxes, self._rank = boxes, rank
        self._conditions, self._timeout = conditions, timeout
        self._depth = depth
        self._step = 0
        self._came: dict[Edge, Payload] = {}
        self._early: list[Letter] = []
        self._under_way: dict[int, deque[int]] = {}
        self._room_at: int | None = None
        self._log = CrossingLog()
        self.route(delegated)

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links are without bound from now on."""
        self._unbounded = {a + b - self._rank for a, b in delegated if self._rank in (a, b)}

    def begin(
        self,
        expected: Sequence[ExpectedMessages] = (),
        signatures: Sequence[str] = (),
        digest: int = 0,
        threaded: bool = True,
        window: Mapping[int, int] | None = None,
    ) -> None:
        """Starts a step: what others sent for it meanwhile is let in."""
        self._step += 1
        box = self._boxes[self._rank]
        with box.changed:
            for letter in self._early:
                heapq.heappush(box.waiting, letter)
            self._early.clear()

    def end(self) -> None:
        """Ends a step. What was sent is in its receiver's mailbox already."""

    def close(self) -> None:
        """Nothing is left behind."""

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        now = time.perf_counter_ns()
        under_way = None
        # Tied gradients ride along with the message of the chain.
        if self._depth is not None and edge.slot <= 0 and target not in self._unbounded:
            under_way = self._under_way.setdefault(target, deque())
            while under_way and under_way[0] <= now:
                under_way.popleft()
            if len(under_way) >= self._depth:
                self._room_at = under_way[len(under_way) - self._depth]
                return False
        self._room_at = None
        num_bytes = size_of(payload)
        due = self._conditions.due(self._rank, target, num_bytes, now)
        if under_way is not None:
            under_way.append(due)
        self._boxes[target].put(Letter(due, 0, self._step, self._rank, now, num_bytes, edge, payload))
        return True

    def arrivals(self) -> list[Edge]:
        box = self._boxes[self._rank]
        with box.changed:
            return self._open(box)

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str]) -> list[Edge]:
        """Waits until at least one message has come in, the channel that was full has room, or `wake` was called.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        box = self._boxes[self._rank]
        end = time.monotonic() + self._timeout
        with box.changed:
            while True:
                came = self._open(box)
                has_room = self._room_at is not None and self._room_at <= time.perf_counter_ns()
                if came or has_room or box.woken:
                    box.woken = False
                    return came
                if box.lost is not None:
                    raise PeerLost(f"rank {box.lost} failed; {who()}")
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}")
                moments = [letter.due for letter in box.waiting[:1]]
                if self._room_at is not None:
                    moments.append(self._room_at)
                if moments:
                    left = min(left, max(0.0, (min(moments) - time.perf_counter_ns()) / 1e9))
                box.changed.wait(left)

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._boxes[self._rank].wake()

    def take(self, edge: Edge) -> Payload:
        return self._came.pop(edge)

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call. Each arrived when it was due, whoever looked when."""
        return self._log.take()

    def _open(self, box: Mailbox) -> list[Edge]:
        """Takes out what is there by now."""
        now, came = time.perf_counter_ns(), []
        while box.waiting and box.waiting[0].due <= now:
            letter = heapq.heappop(box.waiting)
            if letter.step != self._step:  # its sender has begun the next step already
                self._early.append(letter)
                continue
            self._came[letter.edge] = letter.payload
            self._log.add(
                TransferRecord(letter.source, self._rank, letter.num_bytes, letter.sent, letter.sent, letter.due)
            )
            came.append(letter.edge)
        return came
