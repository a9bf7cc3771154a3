"""The protocol of transports: what executors need, whichever transport carries messages.

    begin ---> send, arrivals, take, wait ---> end        once a step; close, when there are no more
                          ^
                        wake                              from any thread

Where link conditions are injected, a `ConditionedTransport` stands in front of the transport that carries:

    rank --> ConditionedTransport --> the transport that carries

A `TransferRecord` has the times of a message, as the receiver knows them. Links are measured by these.

    sender     ......|sent- - - - - - - - - - - - .
    receiver   . . . . . . |posted========arrived|....      this receiver was late: its link took `=`
                            |<- duration ->|

Time spent waiting for a late sender, or for a receiver without room, says nothing about the link. So a transfer
begins when both are ready (ByteDance's what-if analysis, OSDI'25: end minus the later of both starts).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.channel import ExpectedMessages


class TransferRecord(NamedTuple):
    """One message that came in.

    Moments are nanoseconds of the monotonic clock (`time.perf_counter_ns`), which all processes of a host share.
    Two hosts share none: what crosses between them is late by the difference of their clocks as well, always the
    same, so only changes of it mean anything there.

    Attributes:
        source, target: ranks.
        num_bytes: of what the message carries.
        sent: when the sender handed it to its transport.
        posted: when the receiver was ready for it: had a buffer where the transport fills one ahead of time,
            else the same as `sent`.
        arrived: when its last byte was there.
        edge: what it carried.
    """

    source: int
    target: int
    num_bytes: int
    sent: int
    posted: int
    arrived: int
    edge: Edge | None = None

    @property
    def duration(self) -> int:
        """Nanoseconds from when both sides were ready to the message's arrival."""
        return self.arrived - max(self.sent, self.posted)


SHORTEST_WAIT = 100_000
"""Nanoseconds; a wait that took less found its message there already, and nobody knows since when."""

KEPT_CROSSINGS = 10_000
"""Crossings that a rank keeps where nobody asks for them: the latest."""


class CrossingLog:
    """The crossings of one rank since they were last taken. `add` may be called from any thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT_CROSSINGS)

    def add(self, *crossing: Any) -> None:
        """Takes note of one, given as the fields of its record; that is made when it is asked for."""
        self._kept.append(crossing)

    def take(self) -> list[TransferRecord]:
        """All that were added since the last call, oldest first."""
        taken = []
        while self._kept:
            taken.append(TransferRecord(*self._kept.popleft()))
        return taken


@dataclass(frozen=True)
class StepMessages:
    """What a transport is told of a step's messages before it begins.

    Attributes:
        expected: see `expected_by_channel`; the edges in the order in which this rank's frozen order needs them.
        signatures: one per microbatch. Equal signatures promise equal specs.
        digest: a digest of the step's shapes. Ranks with different digests don't take each other's messages.
        threaded: whether arrivals are reported as they come. Dynamic ranks need it, and all that measure their links.
            If not, a rank may learn only of the messages that it waits for.
        window: slot -> most messages of a channel under way, for channels that bring no answers. A slot that is
            missing has no bound.
    """

    expected: Sequence[ExpectedMessages] = ()
    signatures: Sequence[str] = ()
    digest: int = 0
    threaded: bool = True
    window: Mapping[int, int] = field(default_factory=dict)


class Transport(Protocol):
    """One rank's end of all its channels. Only the rank's own thread calls its methods, except `wake`."""

    @property
    def rank(self) -> int:
        """The rank whose end it is."""

    def begin(self, step: StepMessages) -> None:
        """Starts a step."""

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Sends a message. Returns False if the channel is full: try again after a wait."""

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call, as far as is known without waiting.

        Raises what went wrong in the meantime, such as a lost peer or an unexpected message.
        """

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived. It can be taken once."""

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until a message has come in, a full channel may have room, or `wake` was called.

        Returns the edges whose messages came in. If `threaded` was off, only messages of `awaited` end the wait.

        Args:
            who: says in words who waits for what.
            until: if arrivals are reported as they come, when to return at the latest, without any (nanoseconds of
                the monotonic clock).

        Raises:
            DeadlineExceeded, PeerLost: the error says who waited for what, and from whom.
        """

    def wake(self) -> None:
        """Ends this rank's wait, or the next one. Any thread may call it."""

    def crossings(self) -> list[TransferRecord]:
        """Messages that came in since the last call, with their times, if these are known."""

    def end(self) -> None:
        """Ends a step. What was sent is on its way, or has been taken."""

    def close(self) -> None:
        """Releases everything that it holds."""
