"""What executors ask of a transport, whichever carries messages: one protocol for all of them.

    begin ---> send, arrivals, take, wait ---> end        once a step; close, when there are no more
                          ^
                        wake                              from any thread

A `TransportLayer` stands in front of another transport, and passes through all that it does not change:

    rank --> BoundedTransport --> ConditionedTransport --> the transport that carries
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.channel import ExpectedMessages
from penstock.runtime.transport.transfer_record import TransferRecord


class Transport(Protocol):
    """One rank's end of all its channels. The rank's own thread calls all of it but `wake`."""

    @property
    def rank(self) -> int:
        """Whose end it is."""

    def begin(
        self,
        expected: Sequence[ExpectedMessages],
        signatures: Sequence[str],
        digest: int,
        threaded: bool,
        window: Mapping[int, int],
    ) -> None:
        """Starts a step.

        Args:
            expected: see `expected_by_channel`; the edges in the order in which this rank's frozen order needs them.
            signatures: of each microbatch; equal signatures promise equal specs.
            digest: of the step's shapes; ranks that differ in it don't take each other's messages.
            threaded: whether arrivals are reported as they come, as dynamic ranks and all that measure their links
                need it. Where not, a rank may learn of just those that it waits for.
            window: slot -> most messages of a channel under way, for channels that bring no answers. A slot that is
                not there has no bound.
        """

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Sends, or returns False where the channel is full: try again after a wait."""

    def has_room(self, target: int, depth: int) -> bool:
        """Whether fewer than `depth` messages to a rank are under way: sent, and not known to have arrived there.
        Gradients of tied parameters, which ride along, don't count. Where there is no room, `wait` returns when there
        may be.
        """

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call, as far as can be told without waiting.

        Raises what went wrong meanwhile: a peer that is gone, a message that is not expected.
        """

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived, once."""

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until at least one message has come in (one of `awaited`, where only these are reported), a channel
        that was full may have room, or `wake` was called; returns the edges that came.

        Args:
            who: says in words who waits for what.
            until: where arrivals are reported as they come, when to return at the latest, with none (nanoseconds of
                the monotonic clock).

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""

    def crossings(self) -> list[TransferRecord]:
        """Messages that came in since the last call, and when, those of which that is known."""

    def end(self) -> None:
        """Ends a step: what was sent is on its way, or has been taken."""

    def close(self) -> None:
        """Gives back what it holds."""


class TransportLayer:
    """A transport in front of another one, which tells it of all arrivals as they come."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    def begin(
        self,
        expected: Sequence[ExpectedMessages] = (),
        signatures: Sequence[str] = (),
        digest: int = 0,
        threaded: bool = True,
        window: Mapping[int, int] | None = None,
    ) -> None:
        self.inner.begin(expected, signatures, digest, True, window or {})

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        return self.inner.send(edge, target, payload)

    def has_room(self, target: int, depth: int) -> bool:
        return self.inner.has_room(target, depth)

    def arrivals(self) -> list[Edge]:
        return self.inner.arrivals()

    def take(self, edge: Edge) -> Payload:
        return self.inner.take(edge)

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        return self.inner.wait(awaited, who, until)

    def wake(self) -> None:
        self.inner.wake()

    def crossings(self) -> list[TransferRecord]:
        return self.inner.crossings()

    def end(self) -> None:
        self.inner.end()

    def close(self) -> None:
        self.inner.close()


def layers_of(transport: Transport | None) -> Iterator[Any]:
    """A transport and all that it stands in front of, the outermost first."""
    while transport is not None:
        yield transport
        transport = transport.inner if isinstance(transport, TransportLayer) else None
