"""Messages between ranks of one process. They are handed over without a copy; each rank has a mailbox.

If ranks are threads, a rank that waits sleeps until something is put into its mailbox. If they take turns in one
thread, what drives them waits (see `run_local`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.runtime.errors import PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord, Transport
from penstock.runtime.transport.inbox import Mailbox
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions

Handed = tuple[int, Edge, Payload] | None
"""The sender's step, edge and payload; None for each time that the owner of a mailbox was woken."""


class LoopbackTransport:
    """One rank's end.

    Args:
        boxes: everyone's, by rank.
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, boxes: Sequence[Mailbox[Handed]], rank: int, timeout: float = 0.0) -> None:
        self.rank = rank
        self._boxes, self._own, self._timeout = boxes, boxes[rank], timeout
        self._step = 0
        self._ready: dict[Edge, Payload] = {}
        self._early: list[tuple[int, Edge, Payload]] = []

    def begin(self, step: StepMessages) -> None:
        """Starts a step: what others sent for it meanwhile is let in. What it expects makes no difference here."""
        self._step += 1
        for message in self._early:
            self._own.put(message)
        self._early.clear()

    def end(self) -> None:
        """Ends a step. What was sent is in its receiver's mailbox already."""

    def close(self) -> None:
        """Nothing is left behind."""

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        self._boxes[target].put((self._step, edge, payload))
        return True

    def arrivals(self) -> list[Edge]:
        came: list[Edge] = []
        while self._own.entries:
            came += self._came(self._own.entries.popleft())
        return came

    def _came(self, message: Handed) -> list[Edge]:
        """Takes in what lay in the mailbox."""
        if message is None:
            return []
        step, edge, payload = message
        if step != self._step:  # its sender has begun the next step already
            self._early.append(message)
            return []
        self._ready[edge] = payload
        return [edge]

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        box = self._own
        if box.lost is not None and not box.entries:
            box.put(None)
        message = box.get(None, self._timeout, who, until)
        if message is None and box.lost is not None:
            raise PeerLost(f"rank {box.lost} failed; {who()}")
        return self._came(message)

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._own.put(None)

    def take(self, edge: Edge) -> Payload:
        return self._ready.pop(edge)

    def crossings(self) -> list[TransferRecord]:
        """None: what is handed over crosses no link."""
        return []


def loopback_ends(
    boxes: Sequence[Mailbox[Handed]], conditions: Conditions | None, timeout: float = 0.0, depth: int | None = None
) -> list[Transport]:
    """The ends of ranks of one process, by rank, with conditions where given. `depth`: see `ConditionedTransport`."""
    ends: list[Transport] = [LoopbackTransport(boxes, rank, timeout) for rank in range(len(boxes))]
    if conditions is None:
        return ends
    return [ConditionedTransport(end, conditions, depth=depth, hands_over=True) for end in ends]
