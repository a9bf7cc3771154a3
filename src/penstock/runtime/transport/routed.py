"""Gives each link its own transport: the base for most, delegates for a few. The choice may change between steps.

                    .--> base (shared memory, gloo or NCCL) --> rank 0, rank 2
    rank 1 --send--<
                    `--> delegates ---------------------------> rank 3            {(1, 3)} is delegated

Both ends of a link switch at the same step, in which all its messages take the new path. The other path stays as it
was and loses nothing: all messages of a step have been taken when the step ends.

Delegates are started when a link is delegated for the first time. A rank none of whose links is delegated waits as
its base does. Otherwise it sleeps in the delegates' wait and watches the base's descriptor there:

    rank 1 sleeps <---- its delegate says something
                  <---- the base's descriptor is ready: then it polls the base
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord, Transport
from penstock.runtime.transport.delegate.transport import DelegateTransport
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.shared_memory import SharedMemoryTransport


class RoutedTransport:
    """One rank's end of all its channels, by two transports.

    Threads receive if the base needs them to know when each message came.

    Args:
        base: carries messages of all links but the delegated ones, see `route`.
        delegates: carries theirs.
    """

    def __init__(self, base: GlooTransport | SharedMemoryTransport, delegates: DelegateTransport) -> None:
        self.rank = base.rank
        self.base, self.delegates, self.inner = base, delegates, delegates
        self._delegated: set[int] = set()
        """Ranks to which the link is delegated."""
        self._by_delegates: set[Edge] = set()

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links, by their two ranks in either order, go by delegates from now on.
        Every rank says the same.
        """
        self._delegated = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def begin(self, step: StepMessages) -> None:
        """Starts a step on both, and the delegate if this step is the first to need it."""
        step = replace(step, threaded=True)
        theirs = [channel for channel in step.expected if channel.peer in self._delegated]
        self._by_delegates = {edge for channel in theirs for edge, _ in channel.messages}
        if self._delegated:
            self.delegates.start()
            self.delegates.also_watch(self.base.fileno())
        self.delegates.begin(replace(step, expected=theirs))
        ours = [channel for channel in step.expected if channel.peer not in self._delegated]
        self.base.begin(replace(step, expected=ours))

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        return self._carrier(target in self._delegated).send(edge, target, payload)

    def arrivals(self) -> list[Edge]:
        return self.base.arrivals() + (self.delegates.arrivals() if self._delegated else [])

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until something happened on either.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        if self._delegated:
            return self.delegates.wait(awaited, who, until, lambda: self.base.poll(who), self.base.looks_again_after)
        return self.base.wait(awaited, who, until)

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self.base.wake()

    def take(self, edge: Edge) -> Payload:
        return self._carrier(edge in self._by_delegates).take(edge)

    def end(self) -> None:
        self.base.end()
        self.delegates.end()

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in by either since the last call."""
        return self.base.crossings() + self.delegates.crossings()

    def close(self) -> None:
        """Closes the base first: delegates wait for the GPU, which a failed line of NCCL's may hold up until then."""
        self.base.close()
        self.delegates.close()

    def _carrier(self, delegated: bool) -> Transport:
        return self.delegates if delegated else self.base
