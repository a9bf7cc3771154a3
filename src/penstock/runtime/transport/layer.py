"""What a transport that stands in front of another one has in common: all that it does not change passes through.

rank --> BoundedTransport --> ConditionedTransport --> the transport that carries
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import ExpectedMessages
from penstock.runtime.transport.transfer_record import TransferRecord


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
