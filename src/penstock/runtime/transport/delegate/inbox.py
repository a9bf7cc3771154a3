"""What came in and was not taken, by the edge it is about; and slots given back to the delegates that fill them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.base import CrossingLog
from penstock.runtime.transport.channel import ExpectedMessages
from penstock.runtime.transport.delegate.carrier.descriptor import Descriptor, DescriptorKind, Lane
from penstock.runtime.transport.delegate.delegates import DelegateKey, Delegates, PredecessorState
from penstock.runtime.transport.delegate.outbox import lanes_for
from penstock.runtime.transport.wire_format import ALIGN


class HeldMessage(NamedTuple):
    """A message in a delegate's slot."""

    key: DelegateKey
    note: Descriptor


class SeenMessage(NamedTuple):
    """Of a message that came: moments (ns), and the capacity of its slot."""

    sent: int
    arrived: int
    capacity: int


LENT = 64 << 10
"""Bytes from which a message is used where it lies; smaller ones are copied out."""
KEPT = 64
"""Messages of a step from which rates are worked out."""


class DelegateInbox:
    """One rank's."""

    def __init__(self, delegates: Delegates, takes_over: bool = False) -> None:
        self._delegates = delegates
        self._step, self._digest = 0, 0
        self._edges: dict[tuple[int, int], Edge] = {}  # (sender, tag) -> what is yet to come in this step
        self._early: list[HeldMessage] = []
        self._ready: dict[Edge, HeldMessage] = {}
        self._last: dict[Lane, int] = {}
        self._slots: dict[DelegateKey, dict[int, int]] = {}  # offset -> capacity of all that is not given back
        self._watched: set[Lane] = set()
        self._free: dict[DelegateKey, list[Descriptor]] = {}
        self._seen: dict[DelegateKey, deque[SeenMessage]] = {}  # of this step
        self._limits: dict[DelegateKey, int] = {}
        self._lent: dict[DelegateKey, int] = {}
        self._returned: deque[HeldMessage] = deque()
        self.crossings = CrossingLog()
        self._takes_over, self._taken_over = takes_over, -1
        """The step that began in another way: what of it, and of those before, is not expected came in that way."""
        self.doubled = 0
        """Messages that came a second time, and were dropped."""
        self.num_messages = 0

    def begin(self, step: int, digest: int, expected: Sequence[ExpectedMessages], num_lanes: int) -> list[Edge]:
        """A step begins; returns what of it came before it began here.

        Raises:
            RuntimeFailure: what came is not of this step.
        """
        self._post_enough()
        self._step, self._digest, self._edges = step, digest, {}
        return self._expect_all(expected, num_lanes)

    def begin_within(
        self, step: int, digest: int, expected: Sequence[ExpectedMessages], num_lanes: int
    ) -> list[Edge]:
        """A step that began in another way goes on by delegates; returns as `begin`."""
        self._step, self._digest, self._taken_over = step, digest, step
        return self._expect_all(expected, num_lanes)

    def _expect_all(self, expected: Sequence[ExpectedMessages], num_lanes: int) -> list[Edge]:
        """Messages are to come; returns those that did already."""
        self._edges |= {(one.peer, tag): edge for one in expected for edge, tag in one.messages}
        for one in expected:
            for place in range(num_lanes):
                self.expect(Lane(one.peer, self._delegates.rank, kind_of(one), place))
        early, self._early = self._early, []
        return [edge for held in early if (edge := self.came(*held)) is not None]

    def expect(self, lane: Lane) -> None:
        """Has a lane's delegate ready, and on the watch for who is to connect to it."""
        key = DelegateKey(False, lane.kind, lane.place)
        if lane not in self._watched and self._delegates.get(key).order(Descriptor(DescriptorKind.EXPECT, lane)):
            self._watched.add(lane)

    def came(self, key: DelegateKey, note: Descriptor) -> Edge | None:
        """Takes a message in; returns its edge, or None where its step has not begun here.

        Raises:
            RuntimeFailure: it is not expected.
        """
        lane = note.lane
        self._last[lane] = max(note.number, self._last.get(lane, 0))
        self._slots.setdefault(key, {})[note.offset] = note.capacity
        if note.step > self._step:
            self._early.append(HeldMessage(key, note))
            return None
        if self._takes_over and (note.step < self._step or (lane.source, note.tag) not in self._edges):
            if note.step <= self._taken_over:
                self.doubled += 1
                self.free(HeldMessage(key, note))
                return None
            if note.step == self._step:  # its sender goes on by delegates already
                self._early.append(HeldMessage(key, note))
                return None
        edge = self._edges.pop((lane.source, note.tag), None)
        if edge is None or note.step != self._step or note.digest != self._digest:
            raise RuntimeFailure(self._foreign(note, edge))
        self._ready[edge] = HeldMessage(key, note)
        self.num_messages += 1
        self._seen.setdefault(key, deque(maxlen=KEPT)).append(SeenMessage(note.sent, note.arrived, note.capacity))
        size = max(0, note.payload_bytes - ALIGN)
        self.crossings.add(lane.source, lane.target, size, note.sent, note.start, note.arrived)
        return edge

    def _post_enough(self) -> None:
        """Between steps: lets delegates use what the messages on their way take, by the rates of the last step."""
        for key, seen in self._seen.items():
            if len(seen) < 2:
                continue
            sent = sorted(one.sent for one in seen)
            rate = 1e9 / max(1.0, median(after - before for before, after in pairwise(sent)))
            delay = median(one.arrived - one.sent for one in seen) / 1e9
            wanted = lanes_for(rate, max(0.0, delay), 0.0).posted * max(one.capacity for one in seen)
            wanted = min(wanted, self._delegates.host_memory)
            limit = self._limits.setdefault(key, self._delegates.share)
            if wanted > limit and self.grant(key, wanted - limit):
                self._limits[key] = wanted
            seen.clear()

    def _foreign(self, note: Descriptor, edge: Edge | None) -> str:
        what = f"message {note.tag} of step {note.step} from rank {note.lane.source}"
        me = f"rank {self._delegates.rank}"
        if note.step < self._step:
            return f"{me} is at step {self._step} and got {what}; the ranks run different steps"
        if edge is None:
            return f"{me} got {what}, which it does not wait for (any more); the ranks run different schedules"
        return (
            f"{me} got {what} ({edge}) of a batch of other shapes; every rank must give the same inputs and targets"
        )

    def owed(self) -> set[int]:
        """Ranks from which messages are yet to come in this step."""
        return {peer for peer, _ in self._edges}

    def take(self, edge: Edge) -> HeldMessage:
        """A message that came in; its slot is the caller's until `free`."""
        return self._ready.pop(edge)

    def free(self, held: HeldMessage, granted: int = 0) -> None:
        """Gives a slot back, and what was granted for it."""
        note = held.note
        self._slots[held.key].pop(note.offset, None)
        queue = self._free.setdefault(held.key, [])
        queue.append(Descriptor(DescriptorKind.FREE, note.lane, granted, offset=note.offset, capacity=note.capacity))
        self.flush(held.key)

    def lend(self, held: HeldMessage) -> Callable[[], None] | None:
        """Lets a slot be used as it is; what it returns gives it back, from any thread. None: copy it out instead.

        Its delegate may use as much more meanwhile: host memory bounds what is not taken, and as much again is lent.
        """
        capacity = held.note.capacity
        if capacity < LENT or sum(self._lent.values()) + capacity > self._delegates.host_memory:
            return None
        if not self.grant(held.key, capacity):
            return None
        self._lent[held.key] = self._lent.get(held.key, 0) + capacity
        return partial(self._returned.append, held)

    def take_back(self) -> None:
        """Frees the slots that were given back."""
        while self._returned:
            held = self._returned.popleft()
            self._lent[held.key] -= held.note.capacity
            self.free(held, held.note.capacity)

    def flush(self, key: DelegateKey) -> None:
        """Tells a delegate which slots are free, as far as its ring has room."""
        queue = self._free.get(key)
        delegate = self._delegates.get(key) if queue else None
        while queue and delegate is not None and delegate.order(queue[0]):
            queue.pop(0)

    def grant(self, key: DelegateKey, num_bytes: int) -> bool:
        """Lets a delegate use more memory."""
        lane = Lane(0, self._delegates.rank, key.kind, key.place)
        return self._delegates.get(key).order(Descriptor(DescriptorKind.GRANT, lane, num_bytes))

    def restart(self, key: DelegateKey) -> None:
        """Starts a dead delegate again: with what it delivered, and without what is still held of its memory."""
        self._free.pop(key, None)
        self._limits.pop(key, None)
        mine = [lane for lane in self._last if (lane.kind, lane.place) == (key.kind, key.place)]
        resumed = PredecessorState(
            [(lane.source, lane.target, self._last[lane]) for lane in mine],
            list(self._slots.get(key, {}).items()),
            self._delegates.share + self._lent.get(key, 0),
        )
        delegate = self._delegates.restart(key, resumed)
        for lane in self._watched:
            if (lane.kind, lane.place) == (key.kind, key.place):
                delegate.order(Descriptor(DescriptorKind.EXPECT, lane))


def kind_of(expected: ExpectedMessages) -> int:
    """0 for what goes forward through the model, 1 for what goes back."""
    return 0 if expected.key.forward else 1
