"""What a rank has sent and its delegates have not seen answered: slots, numbers, lanes in turn.

    rank --pack--> slot --SEND 7--> delegate        lanes of one kind to one rank take turns:
    free <-- ANSWERED 7 --'                          message a by lane 0, b by lane 1, c by lane 0, ...

How many delegates a link wants, and how many messages under way, follows from what was measured on it (`lanes_for`):

    8 messages a second, each 500 ms in a delegate     -> 4 delegates (PipeMorph, section 5.2)
    8 messages a second, each 300 ms on the way        -> ceil(2 * 0.3 * 8) + 1 = 6 under way
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.delegate.carrier.descriptor import Descriptor, DescriptorKind, Lane
from penstock.runtime.transport.delegate.carrier.shared import DEPTH, Slots
from penstock.runtime.transport.delegate.delegates import DelegateKey, Delegates, PredecessorState


class LaneCount(NamedTuple):
    """Attributes:
    lanes: delegates of one kind and direction, each with a connection of its own.
    posted: messages that must have a place at the receiver, so that none waits for one.
    """

    lanes: int
    posted: int


def lanes_for(
    rate: float,
    delay: float,
    busy: float,
    *,
    num_bytes: float = 0.0,
    window: float = math.inf,
    most: int = 16,
) -> LaneCount:
    """The delegates and places that keep up with the messages of one kind on one link.

    A delegate takes `busy` for each message, so that `rate * busy` of them are at work at once; and a connection
    carries at most a window's bytes in a round trip, so that `rate * num_bytes * 2 delay / window` of them must
    share what the messages bring. A message has a place from when it is announced until the answer is back.

    Args:
        rate: messages a second; delay: seconds one way, PipeMorph's c; busy: seconds of a delegate for one message.
        num_bytes: of a message; window: bytes that a connection may have under way.
        most: delegates.

    Raises:
        RuntimeFailure: a number that is negative, not finite, or makes no sense.
    """
    given = {"rate": rate, "delay": delay, "busy": busy, "num_bytes": num_bytes}
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise RuntimeFailure(f"lanes for a {name} of {value:g}: give a number of at least 0")
    if not window > 0 or most < 1:
        raise RuntimeFailure(f"lanes for a window of {window:g} bytes and {most} at most: give more than 0 of each")
    wanted = max(rate * busy, rate * num_bytes * 2 * delay / window)
    # What fits to a billionth fits: 0.1 * 30 is above 3.
    return LaneCount(max(1, min(most, math.ceil(wanted - 1e-9))), math.ceil(2 * delay * rate - 1e-9) + 1)


MOST_WAITING = DEPTH // 2
"""Messages that one delegate may have: all fit its ring when it starts anew."""
ENOUGH = 8
"""Messages of a step from which rates are worked out."""
KEPT = 64
"""Samples of a rate that are kept."""


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
    busy: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    way: int = 1 << 62


class Outbox:
    """Args:
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
        sent = self._sent_at.setdefault((message.lane.target, message.lane.kind), deque(maxlen=KEPT))
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

    def waiting(self, target: int | None = None) -> int:
        """Messages not answered, to one rank or all."""
        return sum(len(end.waiting) for lane, end in self._lanes.items() if target in (None, lane.target))

    def targets(self) -> set[int]:
        """Ranks to which messages are on their way."""
        return {lane.target for lane, end in self._lanes.items() if end.waiting}

    def restart(self, key: DelegateKey) -> int:
        """Starts a dead delegate again, with all that was not answered; returns how many messages that are."""
        delegate, again = self._delegates.restart(key, PredecessorState([], [], 0)), 0
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
            times = sorted(sent)
            gaps = [after - before for before, after in zip(times, islice(times, 1, None), strict=False)]
            ends = [end for lane, end in self._lanes.items() if (lane.target, lane.kind) == (target, kind)]
            busy = [value for end in ends for value in end.busy]
            sent.clear()
            for end in ends:
                end.busy.clear()
            if len(gaps) < ENOUGH or len(busy) < ENOUGH:
                self._wanted.pop((target, kind), None)
                continue
            way = min(end.way for end in ends)
            wanted = lanes_for(1e9 / max(1.0, median(gaps)), way / 2e9, median(busy) / 1e9, most=self._most).lanes
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
