"""Gives each link its own transport: the base for most, delegates for a few. The choice may change between steps.

                    .--> base (host or gloo) ------> rank 0, rank 2
    rank 1 --send--<
                    `--> delegates ----------------> rank 3            {(1, 3)} is delegated

Both ends of a link switch at the same step. A rank that waits sleeps in the delegates' wait, and the base's inbox
wakes it there, so it continues with whatever happens first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord
from penstock.runtime.transport.delegate.transport import DelegateTransport
from penstock.runtime.transport.gloo import GlooTransport


class RoutedTransport:
    """One rank's end of all its channels, by two transports.

    Args:
        base: of all links but the delegated ones, see `route`.
        delegates: of those.

    Threads receive, so that it is known of all messages when they came.
    """

    def __init__(self, base: GlooTransport, delegates: DelegateTransport) -> None:
        self.rank = base.rank
        self._base, self.delegates = base, delegates
        self._source: dict[Edge, GlooTransport | DelegateTransport] = {}
        self._delegated: set[int] = set()
        delegates.also_watch(base.inbox.fileno())  # a wait for delegates ends when something happens on the base

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links, by their two ranks in either order, go by delegates from now on.
        Every rank says the same.
        """
        self._delegated = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def begin(self, step: StepMessages) -> None:
        """Starts a step on both."""
        step = replace(step, threaded=True)
        self._source = {edge: self._carrier(peer) for _, peer, messages in step.expected for edge, _ in messages}
        by_delegates = [channel for channel in step.expected if channel.peer in self._delegated]
        by_base = [channel for channel in step.expected if channel.peer not in self._delegated]
        self.delegates.begin(replace(step, expected=by_delegates))
        self._base.begin(replace(step, expected=by_base))

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        return self._carrier(target).send(edge, target, payload)

    def arrivals(self) -> list[Edge]:
        return self._base.arrivals() + self.delegates.arrivals()

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until something happened on either.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        if (came := self._base.inbox.poll()) is not None:  # perhaps nothing: a call of `wake`, room in a channel
            return came
        found = self.delegates.wait(awaited, who, until)
        return found + (self._base.inbox.poll() or [])

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._base.wake()

    def take(self, edge: Edge) -> Payload:
        return self._source[edge].take(edge)

    def end(self) -> None:
        self._base.end()
        self.delegates.end()

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in by either since the last call."""
        return self._base.crossings() + self.delegates.crossings()

    def close(self) -> None:
        self.delegates.close()
        self._base.close()

    def _carrier(self, peer: int) -> GlooTransport | DelegateTransport:
        return self.delegates if peer in self._delegated else self._base
