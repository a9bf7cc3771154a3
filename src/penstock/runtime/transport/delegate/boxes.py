"""A rank's messages in the slots that it shares with its delegate: sent and not answered, and come in and not taken.

rank --copies--> slot --SEND 7--> delegate          take <-- slot <--MESSAGE 7-- delegate     by the edge that it
free <-----ANSWERED 7-----'                         free -----FREE------------>               is about
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.base import CrossingLog
from penstock.runtime.transport.channel import ExpectedMessages, why_unexpected
from penstock.runtime.transport.delegate.carrier.descriptor import SLOT_HEAD, Descriptor, DescriptorKind, Lane, Slots
from penstock.runtime.transport.delegate.delegate import DelegateProcess
from penstock.runtime.transport.delegate.health import Counters
from penstock.runtime.transport.wire_format import ALIGN


class Outbox:
    """What one rank has sent: slots, and numbers by which messages are told apart."""

    def __init__(self, delegate: DelegateProcess) -> None:
        self._delegate = delegate
        self._slots = Slots(delegate.host_memory, delegate.host_memory)
        self._given: dict[int, int] = {}
        self._waiting: dict[int, dict[int, Descriptor]] = {}

    def take(self, target: int, num_bytes: int) -> tuple[int, int] | None:
        """A slot for a message; None where there is no room now.

        Raises:
            RuntimeFailure: a message that there will never be room for.
        """
        if num_bytes + SLOT_HEAD > self._slots.limit:
            raise RuntimeFailure(
                f"a message of {num_bytes} bytes to rank {target} is more than the {self._slots.limit} bytes of host "
                "memory that delegates may use; give host_memory= more"
            )
        return self._slots.take(num_bytes + SLOT_HEAD)

    def post(self, message: Descriptor) -> None:
        """Hands a message over, whose first bytes at least are in its slot. It gets the next number."""
        target = message.lane.target
        number = self._given[target] = self._given.get(target, 0) + 1
        message = message._replace(number=number)
        self._waiting.setdefault(target, {})[number] = message
        self._delegate.order(message)

    def answered(self, note: Descriptor) -> None:
        """Frees what was answered."""
        message = self._waiting[note.lane.target].pop(note.number)
        self._slots.free(message.offset, message.capacity)

    def targets(self) -> set[int]:
        """Ranks to which messages are on their way."""
        return {target for target, waiting in self._waiting.items() if waiting}


LENT = 64 << 10
"""Bytes from which a message is used where it lies; smaller ones are copied out."""


class DelegateInbox:
    """What came in for one rank and was not taken.

    Args:
        counters: where it counts messages.
    """

    def __init__(self, delegate: DelegateProcess, counters: Counters) -> None:
        self._delegate, self._counters = delegate, counters
        self._step, self._digest = 0, 0
        self._edges: dict[tuple[int, int], Edge] = {}  # (sender, tag) -> what is yet to come in this step
        self._early: list[Descriptor] = []
        self._ready: dict[Edge, Descriptor] = {}
        self._connected: set[int] = set()
        self._lent = 0
        self._returned: deque[Descriptor] = deque()
        self.crossings = CrossingLog()

    def begin(self, step: int, digest: int, expected: Sequence[ExpectedMessages]) -> list[Edge]:
        """A step begins; returns what of it came before it began here.

        Raises:
            RuntimeFailure: what came is not of this step.
        """
        self._step, self._digest = step, digest
        self._edges = {(one.peer, tag): edge for one in expected for edge, tag in one.messages}
        for one in expected:
            self.connect(one.peer)
        early, self._early = self._early, []
        return [edge for note in early if (edge := self.came(note)) is not None]

    def connect(self, peer: int) -> None:
        """Has the delegate connect to a rank before anything is to be sent there, by which it is known whether the
        other's process is there.
        """
        if peer not in self._connected:
            self._connected.add(peer)
            self._delegate.order(Descriptor(DescriptorKind.CONNECT, Lane(self._delegate.rank, peer)))

    def came(self, note: Descriptor) -> Edge | None:
        """Takes a message in; returns its edge, or None where its step has not begun here.

        Raises:
            RuntimeFailure: it is not expected.
        """
        source = note.lane.source
        if note.step > self._step:
            self._early.append(note)
            return None
        edge = self._edges.pop((source, note.tag), None)
        if edge is None or note.step != self._step or note.digest != self._digest:
            raise RuntimeFailure(why_unexpected(self._delegate.rank, self._step, source, note.step, note.tag, edge))
        self._ready[edge] = note
        self._counters.messages += 1
        self._counters.num_bytes += note.payload_bytes
        size = max(0, note.payload_bytes - ALIGN)
        self.crossings.add(source, note.lane.target, size, note.sent, note.start, note.arrived, edge)
        return edge

    def owed(self) -> set[int]:
        """Ranks from which messages are yet to come in this step."""
        return {peer for peer, _ in self._edges}

    def take(self, edge: Edge) -> Descriptor:
        """A message that came in; its slot is the caller's until `free`."""
        return self._ready.pop(edge)

    def free(self, note: Descriptor, granted: int = 0) -> None:
        """Gives a slot back, and what was granted for it."""
        freed = Descriptor(DescriptorKind.FREE, note.lane, granted, offset=note.offset, capacity=note.capacity)
        self._delegate.order(freed)

    def lend(self, note: Descriptor) -> Callable[[], None] | None:
        """Lets a slot be used as it is; what it returns gives it back, from any thread. None: copy it out instead.

        The delegate may use as much more meanwhile: host memory bounds what is not taken, and as much again is lent.
        """
        if note.capacity < LENT or self._lent + note.capacity > self._delegate.host_memory:
            return None
        self.grant(note.capacity)
        self._lent += note.capacity
        return partial(self._returned.append, note)

    def take_back(self) -> None:
        """Frees the slots that were given back."""
        while self._returned:
            note = self._returned.popleft()
            self._lent -= note.capacity
            self.free(note, note.capacity)

    def grant(self, num_bytes: int) -> None:
        """Lets the delegate use more memory."""
        self._delegate.order(Descriptor(DescriptorKind.GRANT, Lane(0, self._delegate.rank), num_bytes))
