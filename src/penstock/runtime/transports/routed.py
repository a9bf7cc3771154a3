"""Each link by its own transport: most by the base, a few by delegates, and which ones may change between steps.

                    .--> base (host or direct) ----> rank 0, rank 2
    rank 1 --send--<
                    `--> delegates ----------------> rank 3            {(1, 3)} is delegated

Both ends of a link switch at the same step. Both transports report to one inbox, so that a rank waits for either at
once and is woken by what happens first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from queue import Empty
from typing import Any, Protocol

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.message import Edge, Payload
from penstock.runtime.transports.channel import Expected
from penstock.runtime.transports.crossing import Crossing
from penstock.runtime.transports.inbox import Inbox


class Carrier(Protocol):
    """A transport that reports to an inbox."""

    inbox: Inbox

    def begin(
        self,
        expected: Sequence[Expected],
        signatures: Sequence[str],
        digest: int,
        threaded: bool,
        window: Mapping[int, int],
    ) -> None: ...

    def send(self, edge: Edge, target: int, payload: Payload) -> bool: ...

    def take(self, edge: Edge) -> Payload: ...

    def end(self) -> None: ...

    def crossings(self) -> list[Crossing]: ...

    def close(self) -> None: ...


class Base(Carrier, Protocol):
    """The transport of the links that are not delegated; it knows whose end this is and how long to wait."""

    rank: int
    timeout: float


class RoutedTransport:
    """One rank's end of all its channels, by two transports.

    Args:
        base: of all links but the delegated ones.
        delegates: made with the same inbox.
        delegated: links, by their two ranks in either order; the same on every rank.

    Raises:
        RuntimeFailure: the two report to different inboxes.
    """

    def __init__(self, base: Base, delegates: Carrier, delegated: Collection[tuple[int, int]] = ()) -> None:
        if base.inbox is not delegates.inbox:
            raise RuntimeFailure(
                "the transports of one rank must report to one inbox; make both with the same inbox="
            )
        self._base, self._delegates = base, delegates
        self._source: dict[Edge, Carrier] = {}
        self.rank, self.timeout, self.inbox = base.rank, base.timeout, base.inbox
        self.route(delegated)

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links go by delegates from now on. Every rank says the same."""
        self._delegated = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def begin(
        self,
        expected: Sequence[Expected],
        signatures: Sequence[str],
        digest: int,
        threaded: bool,
        window: Mapping[int, int],
    ) -> None:
        """Starts a step on both, with threads: a rank can't wait for one message of two transports."""
        self._source = {edge: self._carrier(peer) for _, peer, messages in expected for edge, _ in messages}
        for carrier in (self._base, self._delegates):
            mine = [channel for channel in expected if self._carrier(channel.peer) is carrier]
            carrier.begin(mine, signatures, digest, True, window)

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        return self._carrier(target).send(edge, target, payload)

    def arrivals(self) -> list[Edge]:
        return self.inbox.arrivals()

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str]) -> list[Edge]:
        """Waits until something has happened on either.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        try:
            return self.inbox.wait(self.timeout)
        except Empty:
            raise DeadlineExceeded(f"nothing came in for {self.timeout:g} s: {who()}") from None

    def take(self, edge: Edge) -> Payload:
        return self._source[edge].take(edge)

    def end(self) -> None:
        self._base.end()
        self._delegates.end()

    def crossings(self) -> list[Crossing]:
        """The messages that came in by either since the last call."""
        return self._base.crossings() + self._delegates.crossings()

    def link_events(self) -> list[Any]:
        """What happened to links since the last call, told by those of the two that tell it."""
        return [event for carrier in self._telling("link_events") for event in carrier.link_events()]

    @property
    def counters(self) -> dict[str, float]:
        """The sum of what those of the two count that count something."""
        total: dict[str, float] = {}
        for carrier in self._telling("counters"):
            for name, count in carrier.counters.items():
                total[name] = total.get(name, 0) + count
        return total

    def close(self) -> None:
        self._base.close()
        self._delegates.close()

    def _carrier(self, peer: int) -> Carrier:
        return self._delegates if peer in self._delegated else self._base

    def _telling(self, what: str) -> list[Any]:
        return [carrier for carrier in (self._base, self._delegates) if hasattr(carrier, what)]
