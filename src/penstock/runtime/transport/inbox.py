"""What came in for a rank: the messages of its step, each by its edge, and the events for which it sleeps.

A transport's threads put events in, and the rank takes them out.

    a thread a channel ----put----> +-------+
    acknowledgements   ----put----> | Inbox | ----wait----> the rank: event() -> the edges that came in
                                    +-------+ ---fileno---> to wait for it beside other things

An event is a function that the rank calls in its own thread. It records what happened and returns the edges whose
messages came in (none, if it says that a full channel has room again), or raises.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.base import CrossingLog, StepMessages
from penstock.runtime.transport.channel import why_unexpected

M = TypeVar("M")
T = TypeVar("T")

ArrivalEvent = Callable[[], list[Edge]]
FINELY, BRIEFLY = 0.002, 0.0001
"""Seconds before a given moment from which a rank that polls descriptors sleeps in small pieces, and how long these
are: the system's poll counts milliseconds."""
POLL_S = 0.5
"""Seconds after which a rank that sleeps looks up, even if nothing woke it."""
THREADS_WAIT = 50
"""How many times as long as the rank a thread waits. The rank may compute for long before it wants the message; when
it waits, its own deadline counts, and a peer that is gone ends both waits at once."""


def sleep_until_found(
    find: Callable[[], T | None],
    sleep: Callable[[float], object],
    timeout: float,
    who: Callable[[], str],
    until: int | None = None,
    look: Callable[[], float] = lambda: POLL_S,
) -> T | None:
    """Looks and sleeps in turn until a look finds something. Returns that, or None if `until` came first.

    Args:
        find: looks; returns None if there is nothing yet.
        sleep: sleeps for at most so many seconds, less if there may be something to find.
        timeout: seconds before DeadlineExceeded. who: says in words who waits for what.
        until: when to return at the latest, in nanoseconds of the monotonic clock.
        look: how many seconds a sleep lasts at most.

    Raises:
        DeadlineExceeded: nothing was found in time.
    """
    end = time.monotonic() + timeout
    while (found := find()) is None:
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"nothing came in for {timeout:g} s: {who()}")
        if until is not None:
            soon = (until - perf_counter_ns()) / 1e9
            if soon <= 0:
                return None
            if soon < FINELY:
                time.sleep(min(soon, BRIEFLY))
                continue
            left = min(left, soon - FINELY / 2)
        sleep(min(look(), left))
    return found


class Mailbox(Generic[T]):
    """Entries that any thread puts in, for one thread that waits for them.

    `queue.SimpleQueue.get(timeout)` of CPython 3.11 may wait without end. The method works out anew how much time
    is left, and takes a negative time for no limit. `queue.Queue.put` holds a lock. If a finalizer runs in the same
    thread meanwhile and puts an entry in, the finalizer waits for that lock without end.

    Attributes:
        entries: the entries that nobody has taken yet, in the order in which they came.
        lost: a rank that failed, of those that put entries in.
    """

    def __init__(self) -> None:
        self.entries: deque[T] = deque()
        self.lost: int | None = None
        self._bell = threading.Lock()

    def put(self, entry: T) -> None:
        self.entries.append(entry)
        with suppress(RuntimeError):  # it has rung already
            self._bell.release()

    def lose(self, rank: int, entry: T) -> None:
        """Lets the owner know that another rank failed, by a last entry."""
        self.lost = rank
        self.put(entry)

    def get(self, absent: T, timeout: float, who: Callable[[], str], until: int | None = None) -> T:
        """The next entry, or `absent` if `until` comes first. Arguments as in `sleep_until_found`.

        Raises:
            DeadlineExceeded: none came in time.
        """
        end = perf_counter_ns() + round(timeout * 1e9)
        last = end if until is None else min(end, until)
        while not self.entries:
            if (left := last - perf_counter_ns()) > 0:
                self._bell.acquire(timeout=left / 1e9)
            elif last == until:
                return absent
            else:
                raise DeadlineExceeded(f"nothing came in for {timeout:g} s: {who()}")
        return self.entries.popleft()


class Inbox:
    """Events of one rank. `put` and `fail` may be called from any thread, the rest from the rank's own."""

    def __init__(self) -> None:
        self._events: Mailbox[ArrivalEvent] = Mailbox()
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
        while self._events.entries:
            event = self._events.entries.popleft()
            try:
                edges = (edges or []) + event()
            except BaseException as error:
                if not edges:
                    raise
                self.fail(error)
                break
        return edges

    def wait(self, timeout: float, who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Takes the next event; the edges that it brought, perhaps none. Returns none at `until`, either.

        Raises:
            DeadlineExceeded: nothing happened for `timeout` seconds.
        """
        return self._events.get(list, timeout, who, until)()

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


class StepInbox(Generic[M]):
    """A rank's messages of a step: those that it expects, and those that came in and were not taken.

    Attributes:
        step: the number of the step. stamp: the number with the digest of the step's shapes; each message brings it.
        crossings: of what came in.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.step = self.stamp = 0
        self._due: dict[tuple[int, int], Edge] = {}
        """By sender and tag."""
        self._early: list[tuple[Any, ...]] = []
        self._ready: dict[Edge, M] = {}
        self._arrived: list[Edge] = []
        self.crossings = CrossingLog()

    def begin(self, step: StepMessages) -> None:
        """Begins a step, with those of its messages that came before.

        Raises:
            RuntimeFailure: one of them is not expected.
        """
        self.step += 1
        self.stamp = self.step << 32 | step.digest & 0xFFFFFFFF
        self._due = {(peer, tag): edge for _, peer, messages in step.expected for edge, tag in messages}
        early, self._early, self._arrived = self._early, [], []
        for each in early:
            self.came(*each)

    def came(self, peer: int, tag: int, stamp: int, message: M, *times: int) -> None:
        """Takes in a message from a rank; of the next step, it waits for that.

        Args:
            times: the bytes that it carries; when it was sent, could be received, and arrived.

        Raises:
            RuntimeFailure: it is not expected.
        """
        of_step = stamp >> 32
        if of_step > self.step:
            self._early.append((peer, tag, stamp, message, *times))
            return
        edge = self._due.pop((peer, tag), None)
        if edge is None or stamp != self.stamp:
            raise RuntimeFailure(why_unexpected(self._rank, self.step, peer, of_step, tag))
        self._ready[edge] = message
        self._arrived.append(edge)
        self.crossings.add(peer, self._rank, *times, edge)

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call."""
        arrived = self._arrived
        if arrived:
            self._arrived = []
        return arrived

    def take(self, edge: Edge) -> M:
        """The message of an edge that has arrived."""
        return self._ready.pop(edge)

    def owed(self) -> set[int]:
        """Ranks from which messages are yet to come."""
        return {peer for peer, _ in self._due}
