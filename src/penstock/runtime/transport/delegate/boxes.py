"""A rank's messages in the slots of its delegates: sent and not seen answered, and come in and not taken.

    rank --pack--> slot --SEND 7--> delegate        lanes of one kind to one rank take turns:
    free <-- ANSWERED 7 --'                          message a by lane 0, b by lane 1, c by lane 0, ...

    take <-- slot <--MESSAGE 7-- delegate            by the edge that it is about
    free -----FREE------------>

How many delegates a link wants, and how many messages under way, follows from what was measured on it (`lanes_for`):

    8 messages a second, each 500 ms in a delegate     -> 4 delegates (PipeMorph, section 5.2)
    8 messages a second, each 300 ms on the way        -> ceil(2 * 0.3 * 8) + 1 = 6 under way
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.base import CrossingLog
from penstock.runtime.transport.channel import ExpectedMessages, why_unexpected
from penstock.runtime.transport.delegate.carrier.descriptor import Descriptor, DescriptorKind, Lane
from penstock.runtime.transport.delegate.carrier.shared import DEPTH, Slots
from penstock.runtime.transport.delegate.delegates import DelegateKey, Delegates
from penstock.runtime.transport.delegate.health import Counters
from penstock.runtime.transport.wire_format import ALIGN


class LaneCount(NamedTuple):
    """How many delegates a link needs, and how many messages may be on their way.

    Attributes:
        lanes: delegates of one kind and direction, each with a connection of its own.
        posted: messages that must have a place at the receiver, so that none waits for one.
    """

    lanes: int
    posted: int


def lanes_for(rate: float, delay: float, busy: float, most: int = 16) -> LaneCount:
    """The delegates and places that keep up with the messages of one kind on one link.

    A delegate takes `busy` for each message, so that `rate * busy` of them are at work at once. A message has a place
    from when it is announced until the answer is back.

    Args:
        rate: messages a second; delay: seconds one way, PipeMorph's c; busy: seconds of a delegate for one message.
        most: delegates.

    Raises:
        RuntimeFailure: a number that is negative, not finite, or makes no sense.
    """
    for name, value in {"rate": rate, "delay": delay, "busy": busy}.items():
        if not 0 <= value < math.inf:
            raise RuntimeFailure(f"lanes for a {name} of {value:g}: give a number of at least 0")
    if most < 1:
        raise RuntimeFailure(f"{most} lanes at most: give at least 1")
    # What fits to a billionth fits: 0.1 * 30 is above 3.
    return LaneCount(max(1, min(most, math.ceil(rate * busy - 1e-9))), math.ceil(2 * delay * rate - 1e-9) + 1)


def rate_of(moments: Iterable[int]) -> float:
    """Messages a second, by the median of the nanoseconds between them."""
    return 1e9 / max(1.0, median(after - before for before, after in pairwise(sorted(moments))))


MOST_WAITING = DEPTH // 2
"""Messages that one delegate may have: all fit its ring when it starts anew."""
LEAST_GAPS = 8
"""Times between messages of a step, at least, from which it is worked out how many lanes they need."""
KEPT_MESSAGES = 64
"""Messages of a step, the latest, from which rates are worked out."""


@dataclass
class OutEnd:
    """A lane's end: the last number given, and what was not answered.

    Attributes:
        busy: nanoseconds between answers of messages that waited for each other.
        way: the shortest time from a message's leave to its answer.
    """

    given: int = 0
    waiting: deque[Descriptor] = field(default_factory=deque)
    answered_at: int = 0
    busy: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_MESSAGES))
    way: int = 1 << 62


class Outbox:
    """What one rank has sent: slots, numbers, lanes in turn.

    Args:
        num_lanes: delegates of each kind to begin with; most_lanes: as many as measured rates may ask for.
    """

    def __init__(self, delegates: Delegates, num_lanes: int, most_lanes: int) -> None:
        self._delegates, self._most = delegates, most_lanes
        self._slots = Slots(delegates.host_memory, delegates.host_memory)
        self._lanes: dict[Lane, OutEnd] = {}
        self._first = num_lanes
        self.num_lanes: dict[tuple[int, int], int] = {}
        self._turn: dict[tuple[int, int], int] = {}
        self._sent_at: dict[tuple[int, int], deque[int]] = {}
        self._wanted: dict[tuple[int, int], int] = {}
        self._load: dict[DelegateKey, int] = {}

    def take(self, target: int, kind: int, num_bytes: int) -> tuple[Lane, tuple[int, int]] | None:
        """The lane whose turn it is and a slot for a message; None where there is no room now.

        Raises:
            RuntimeFailure: a message that there will never be room for.
        """
        if num_bytes > self._slots.limit:
            raise RuntimeFailure(
                f"a message of {num_bytes} bytes to rank {target} is more than the {self._slots.limit} bytes of host "
                "memory that delegates may use; give host_memory= more"
            )
        turn = self._turn.get((target, kind), 0)
        lane = Lane(self._delegates.rank, target, kind, turn % self.lanes_to(target, kind))
        if self._load.get(_delegate_of(lane), 0) >= MOST_WAITING:
            return None
        slot = self._slots.take(num_bytes)
        if slot is None:
            return None
        self._turn[target, kind] = turn + 1
        self._load[_delegate_of(lane)] = self._load.get(_delegate_of(lane), 0) + 1
        return lane, slot

    def lanes_to(self, target: int, kind: int) -> int:
        return self.num_lanes.setdefault((target, kind), self._first)

    def post(self, message: Descriptor) -> None:
        """Hands a message over; its slot is full. It gets its lane's next number."""
        end = self._end(message.lane)
        end.given += 1
        message = message._replace(number=end.given)
        end.waiting.append(message)
        self._delegates.get(_delegate_of(message.lane)).order(message)
        sent = self._sent_at.setdefault((message.lane.target, message.lane.kind), deque(maxlen=KEPT_MESSAGES))
        sent.append(message.sent)

    def connect(self, target: int, kind: int) -> None:
        """Has the lanes to a rank connected before the first message."""
        for place in range(self.lanes_to(target, kind)):
            lane = Lane(self._delegates.rank, target, kind, place)
            if lane not in self._lanes:
                self._end(lane)
                self._delegates.get(_delegate_of(lane)).order(Descriptor(DescriptorKind.CONNECT, lane))

    def answered(self, note: Descriptor) -> bool:
        """Frees what was answered; returns whether that is any."""
        end = self._end(note.lane)
        freed = False
        while end.waiting and end.waiting[0].number <= note.number:
            message = end.waiting.popleft()
            self._slots.free(message.offset, message.capacity)
            self._load[_delegate_of(note.lane)] -= 1
            end.way = min(end.way, note.arrived - message.sent)
            if message.sent < end.answered_at:
                end.busy.append(note.arrived - end.answered_at)
            end.answered_at = note.arrived
            freed = True
        return freed

    def targets(self) -> set[int]:
        """Ranks to which messages are on their way."""
        return {lane.target for lane, end in self._lanes.items() if end.waiting}

    def restart(self, key: DelegateKey) -> int:
        """Starts a dead delegate again, with all that was not answered; returns how many messages that are."""
        delegate, again = self._delegates.restart(key), 0
        for lane, end in self._lanes.items():
            if _delegate_of(lane) != key:
                continue
            if not end.waiting:
                delegate.order(Descriptor(DescriptorKind.CONNECT, lane, end.given))
            for message in end.waiting:
                delegate.order(message)
                again += 1
        return again

    def grow(self) -> None:
        """Between steps: lanes for the rates of the last one, where they ask for more twice in a row."""
        for (target, kind), sent in self._sent_at.items():
            moments = list(sent)
            ends = [end for lane, end in self._lanes.items() if (lane.target, lane.kind) == (target, kind)]
            busy = [value for end in ends for value in end.busy]
            sent.clear()
            for end in ends:
                end.busy.clear()
            if len(moments) <= LEAST_GAPS or len(busy) < LEAST_GAPS:
                self._wanted.pop((target, kind), None)
                continue
            way = min(end.way for end in ends)
            wanted = lanes_for(rate_of(moments), way / 2e9, median(busy) / 1e9, most=self._most).lanes
            before = self._wanted.get((target, kind), 0)
            self._wanted[target, kind] = wanted
            if min(before, wanted) > self.num_lanes[target, kind]:
                self.num_lanes[target, kind] += 1

    def _end(self, lane: Lane) -> OutEnd:
        end = self._lanes.get(lane)
        if end is None:
            end = self._lanes[lane] = OutEnd(answered_at=perf_counter_ns())
        return end


def _delegate_of(lane: Lane) -> DelegateKey:
    return DelegateKey(True, lane.kind, lane.place)


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


class DelegateInbox:
    """What came in for one rank and was not taken; and slots given back to the delegates that fill them.

    Args:
        counters: where it counts messages. takes_over: see `DelegateTransport`.
    """

    def __init__(self, delegates: Delegates, counters: Counters, takes_over: bool = False) -> None:
        self._delegates, self._counters = delegates, counters
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
                self.expect(Lane(one.peer, self._delegates.rank, 0 if one.key.forward else 1, place))
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
                self._counters.doubled += 1
                self.free(HeldMessage(key, note))
                return None
            if note.step == self._step:  # its sender goes on by delegates already
                self._early.append(HeldMessage(key, note))
                return None
        edge = self._edges.pop((lane.source, note.tag), None)
        if edge is None or note.step != self._step or note.digest != self._digest:
            rank, source = self._delegates.rank, lane.source
            raise RuntimeFailure(why_unexpected(rank, self._step, source, note.step, note.tag, edge))
        self._ready[edge] = HeldMessage(key, note)
        self._counters.messages += 1
        self._counters.num_bytes += note.payload_bytes
        self._seen.setdefault(key, deque(maxlen=KEPT_MESSAGES)).append(
            SeenMessage(note.sent, note.arrived, note.capacity)
        )
        size = max(0, note.payload_bytes - ALIGN)
        self.crossings.add(lane.source, lane.target, size, note.sent, note.start, note.arrived, edge)
        return edge

    def _post_enough(self) -> None:
        """Between steps: lets delegates use what the messages on their way take, by the rates of the last step."""
        for key, seen in self._seen.items():
            if len(seen) < 2:
                continue
            rate = rate_of(one.sent for one in seen)
            delay = median(one.arrived - one.sent for one in seen) / 1e9
            wanted = lanes_for(rate, max(0.0, delay), 0.0).posted * max(one.capacity for one in seen)
            wanted = min(wanted, self._delegates.host_memory)
            limit = self._limits.setdefault(key, self._delegates.share)
            if wanted > limit and self.grant(key, wanted - limit):
                self._limits[key] = wanted
            seen.clear()

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
        delegate = self._delegates.restart(
            key,
            lanes=[(lane.source, lane.target, self._last[lane]) for lane in mine],
            taken=list(self._slots.get(key, {}).items()),
            limit=self._delegates.share + self._lent.get(key, 0),
        )
        for lane in self._watched:
            if (lane.kind, lane.place) == (key.kind, key.place):
                delegate.order(Descriptor(DescriptorKind.EXPECT, lane))
