"""Each link by its own transport: most by the base, a few by delegates, and which ones may change between steps.

                    .--> base (host or gloo) ------> rank 0, rank 2
    rank 1 --send--<
                    `--> delegates ----------------> rank 3            {(1, 3)} is delegated

Both ends of a link switch at the same step. A rank that waits sleeps where the delegates let it, and the base's inbox
wakes it there: it goes on at what happens first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import ExpectedMessages
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.transfer_record import TransferRecord


class Delegates(Transport, Protocol):
    """A transport that processes of their own carry for."""

    @property
    def counters(self) -> Any:
        """What they count."""

    def also_watch(self, descriptor: int) -> None:
        """Lets `wait` return, too, when this descriptor is ready to be read."""

    def link_events(self) -> list[Any]:
        """Links whose interfaces died or came back since the last call."""

    def prepare(self, links: Collection[tuple[int, int]]) -> None:
        """Starts the delegates of links before they are needed; any thread may call it."""


class RoutedTransport:
    """One rank's end of all its channels, by two transports.

    Args:
        base: of all links but the delegated ones.
        delegates: of those.
        delegated: links, by their two ranks in either order; the same on every rank.
    """

    def __init__(
        self, base: GlooTransport, delegates: Delegates, delegated: Collection[tuple[int, int]] = ()
    ) -> None:
        self.rank = base.rank
        self._base, self._delegates = base, delegates
        self._source: dict[Edge, GlooTransport | Delegates] = {}
        delegates.also_watch(base.inbox.fileno())
        self.route(delegated)

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links go by delegates from now on. Every rank says the same."""
        self._delegated = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def prepare(self, links: Collection[tuple[int, int]]) -> None:
        """Starts the delegates of links that are to be delegated, before they are needed. Any thread may call it."""
        self._delegates.prepare(links)

    def begin(
        self,
        expected: Sequence[ExpectedMessages],
        signatures: Sequence[str],
        digest: int,
        threaded: bool,
        window: Mapping[int, int],
    ) -> None:
        """Starts a step on both. Threads receive, for nobody can wait for one message of
        two transports.
        """
        self._source = {edge: self._carrier(peer) for _, peer, messages in expected for edge, _ in messages}
        for carrier in (self._base, self._delegates):
            mine = [channel for channel in expected if self._carrier(channel.peer) is carrier]
            carrier.begin(mine, signatures, digest, True, window)

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        return self._carrier(target).send(edge, target, payload)

    def has_room(self, target: int, depth: int) -> bool:
        return self._carrier(target).has_room(target, depth)

    def arrivals(self) -> list[Edge]:
        return self._base.arrivals() + self._delegates.arrivals()

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until something happened on either.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        came = self._base.inbox.poll()
        if came is not None:
            return came
        found = self._delegates.wait(awaited, who, until)
        return found + (self._base.inbox.poll() or [])

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._base.wake()

    def take(self, edge: Edge) -> Payload:
        return self._source[edge].take(edge)

    def end(self) -> None:
        self._base.end()
        self._delegates.end()

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in by either since the last call."""
        return self._base.crossings() + self._delegates.crossings()

    def link_events(self) -> list[Any]:
        """What happened to the delegates' links since the last call."""
        return self._delegates.link_events()

    @property
    def counters(self) -> Any:
        """What the delegates count."""
        return self._delegates.counters

    def close(self) -> None:
        self._delegates.close()
        self._base.close()

    def _carrier(self, peer: int) -> GlooTransport | Delegates:
        return self._delegates if peer in self._delegated else self._base
