"""Injects link conditions into a run: they decide when a message counts as arrived, whatever carries it.

    sender    --send--> Conditions: when is it to arrive? --message, with that moment--> the transport that carries
    receiver  <--arrivals-- kept until that moment <-- the transport that carries

Nothing waits on the sender's side. The message is there early, where the rank does not see it yet. If it takes longer
to carry, it arrives later: conditions make links worse, never better. The moment is given by the sender's clock;
ranks on other hosts know how far that clock is ahead of theirs.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from penstock.cost import LinkCondition, Ring
from penstock.cost.conditions import LinkQueue
from penstock.cost.links import LinkQueues, Links
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import clock_name
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import ahead_of_first
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import CrossingLog, StepMessages, TransferRecord, Transport, TransportLayer

KNOWN = 64
"""Messages of each rank of which it is remembered when they were sent, for records that come after them."""


class Conditions:
    """Link conditions at work. They may be changed between steps.

    Args:
        stretch: seconds of the clock to one second of the conditions' time.
        origin: when the conditions' time starts, in nanoseconds of the monotonic clock; now where not given.
    """

    def __init__(self, conditions: Links, stretch: float = 1.0, origin: int | None = None) -> None:
        self._takes_up = threading.Lock()  # half-duplex queues have senders in two threads
        self.start(conditions, stretch, origin)

    def start(self, conditions: Links, stretch: float = 1.0, origin: int | None = None) -> None:
        """Starts anew, with other conditions."""
        self._lines = LinkQueues(conditions)
        self._stretch = stretch * 1e6
        self.origin = time.perf_counter_ns() if origin is None else origin

    @property
    def links(self) -> Links:
        return self._lines.links

    def require_own_queues(self) -> None:
        """Raises RuntimeFailure where both directions of a link share a queue."""
        shared = [f"{a}:{b}" for (a, b), each in self._lines.links.conditions.items() if each.half_duplex]
        if shared:
            raise RuntimeFailure(
                f"link {shared[0]} is half-duplex: both directions share a queue, which the processes at its ends "
                "cannot; emulate it with threads or leave half-duplex out"
            )

    def hold(self, source: int, target: int) -> bool:
        """Whether there is a condition from one rank to another at all."""
        links = self._lines.links
        return links.base > 0 or links.named(source, target)[1] is not None

    def due(self, source: int, target: int, num_bytes: float, sent: int | None = None) -> int:
        """When a message sent at `sent`, or now, is to arrive, in nanoseconds of the monotonic clock. Takes it up."""
        sent = time.perf_counter_ns() if sent is None else sent
        now = (sent - self.origin) / self._stretch
        with self._takes_up:
            arrived = self._lines.arrival(source, target, num_bytes, now)
        return max(sent, self.origin + math.ceil(arrived * self._stretch))


def size_of(payload: Payload) -> int:
    """Bytes of what a payload carries."""
    return sum(leaf.numel() * leaf.element_size() for leaf in payload.leaves if leaf is not None)


class MessageStamp(NamedTuple):
    """What a message brings beside its payload: who sent it, when, and when it is to arrive (ns of the sender's
    clock). The two moments are equal on a link without conditions.
    """

    source: int
    sent: int
    due: int

    def put_on(self, payload: Payload) -> Payload:
        return Payload(
            [*payload.leaves, torch.tensor(self, device="cpu")], payload.skeleton, [*payload.needs_grad, False]
        )

    @classmethod
    def take_off(cls, payload: Payload) -> MessageStamp:
        stamp, payload.needs_grad = payload.leaves.pop(), payload.needs_grad[:-1]
        assert stamp is not None
        return cls(*stamp.tolist())


class HeldArrival(NamedTuple):
    """A message that was carried here. Ordered by when it is to arrive, then by when it came.

    Attributes:
        record: of links with conditions.
    """

    due: int
    number: int
    edge: Edge
    record: TransferRecord | None


class ConditionedTransport(TransportLayer):
    """Any transport, whose messages arrive when the conditions say.

    Args:
        conditions: of the links, the same on all ranks.
        ahead: by how many nanoseconds this rank's clock is ahead of each other rank's; one clock where not given.
    """

    def __init__(self, inner: Transport, conditions: Conditions, ahead: Sequence[int] = ()) -> None:
        super().__init__(inner)
        self._conditions, self._ahead = conditions, ahead
        self._refused: tuple[Edge, int, MessageStamp] | None = None
        self._dues: dict[int, deque[int]] = {}
        self._watched: deque[int] | None = None
        self._waiting: list[HeldArrival] = []
        self._ready: dict[Edge, Payload] = {}
        self._num_carried = 0
        self._woken = False
        self._known: dict[int, deque[tuple[int, int, int]]] = {}
        self._log = CrossingLog()

    def begin(self, step: StepMessages) -> None:
        self._watched = self._refused = None
        super().begin(step)

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Sends. What finds a channel full that carries it took up the link when it was first to be sent."""
        if self._refused is not None and self._refused[:2] == (edge, target):
            stamp = self._refused[2]
        else:
            sent = due = time.perf_counter_ns()
            if self._conditions.hold(self.rank, target):
                due = self._conditions.due(self.rank, target, size_of(payload), sent)
            stamp = MessageStamp(self.rank, sent, due)
        if not self.inner.send(edge, target, stamp.put_on(payload)):
            self._refused = edge, target, stamp
            return False
        self._refused = None
        if edge.slot <= 0 and stamp.due > stamp.sent:
            self._dues.setdefault(target, deque()).append(stamp.due)
        return True

    def has_room(self, target: int, depth: int) -> bool:
        dues, self._watched = self._dues.get(target), None
        if dues:
            now = time.perf_counter_ns()
            while dues and dues[0] <= now:
                dues.popleft()
            if len(dues) >= depth:
                self._watched = dues
                return False
        return self.inner.has_room(target, depth)

    def arrivals(self) -> list[Edge]:
        self._keep(self.inner.arrivals())
        return self._due_by_now()

    def _keep(self, edges: Sequence[Edge]) -> None:
        """Takes in what was carried here."""
        if not edges:
            return
        # Records first: their messages have then come in, if not with `edges`.
        records = self.inner.crossings()
        found = []
        for edge in [*edges, *self.inner.arrivals()]:
            payload = self._ready[edge] = self.inner.take(edge)
            stamp, size = MessageStamp.take_off(payload), size_of(payload)
            found.append((edge, stamp, size))
            self._known.setdefault(stamp.source, deque(maxlen=KNOWN)).append((stamp.sent, stamp.due, size))
        arrived = self._carried(records)
        for edge, stamp, size in found:
            due = stamp.due + (self._ahead[stamp.source] if self._ahead else 0)
            moment = max(due, arrived.get((stamp.source, stamp.sent), 0))
            record = TransferRecord(stamp.source, self.rank, size, stamp.sent, stamp.sent, moment)
            held = HeldArrival(due, self._num_carried, edge, record if self._records(stamp) else None)
            heapq.heappush(self._waiting, held)
            self._num_carried += 1

    def _carried(self, records: Sequence[TransferRecord]) -> dict[tuple[int, int], int]:
        """Logs the records of messages without a condition; of the others, by source and sending, when they came."""
        arrived = {}
        for record in records:
            # A rank sends one message after the other, so it is the latest that was not handed over later.
            known = [one for one in self._known.get(record.source, ()) if one[0] <= record.sent]
            if known:
                sent, due, size = max(known)
                if due > sent:
                    arrived[record.source, sent] = record.arrived
                else:
                    self._log.add(*record._replace(num_bytes=size))
        return arrived

    def _records(self, stamp: MessageStamp) -> bool:
        """Whether a message is recorded here. What carried it records when it came, where nothing delays it."""
        return stamp.due > stamp.sent

    def _due_by_now(self) -> list[Edge]:
        waiting, came = self._waiting, []
        if waiting:
            now = time.perf_counter_ns()
            while waiting and waiting[0].due <= now:
                held = heapq.heappop(waiting)
                if held.record is not None:
                    self._log.add(*held.record)
                came.append(held.edge)
        return came

    def dues(self) -> list[int]:
        """When each message that was carried here, and has not come, is to arrive."""
        self._keep(self.inner.arrivals())
        return [held.due for held in self._waiting]

    def take(self, edge: Edge) -> Payload:
        return self._ready.pop(edge)

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        while True:
            came = self._due_by_now()
            if came or self._woken:
                self._woken = False
                return came
            moments = [held.due for held in self._waiting[:1]]
            if self._watched:
                moments.append(self._watched[0])
            if until is not None:
                moments.append(until)
            soonest = min(moments, default=None)
            carried = self.inner.wait(awaited, who, soonest)
            self._keep(carried)
            now = time.perf_counter_ns()
            has_room = False
            if self._watched and self._watched[0] <= now:
                has_room, self._watched = True, None
            came = self._due_by_now()
            # With nothing carried before that moment, the transport that carries has room again.
            if came or has_room or (not carried and (soonest is None or now < soonest)) or _is_over(until, now):
                self._woken = False
                return came

    def wake(self) -> None:
        self._woken = True
        self.inner.wake()

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call. Those of links with conditions arrived when these say, or
        when they had been carried, if that was later.
        """
        self._carried(self.inner.crossings())  # of messages that came in after the records were last asked for
        return self._log.take()


def _is_over(until: int | None, now: int) -> bool:
    return until is not None and until <= now


def clocks_ahead(peers: GroupPeers) -> list[int]:
    """By how many nanoseconds this process's clock is ahead of each rank's. Every process must call it."""
    ahead = peers.gather(ahead_of_first(peers, peers.gather(clock_name())))
    return [ahead[peers.here[0]] - each for each in ahead]


class LateRing:
    """The ring in which one rank's replicas add gradients up: a sum ends when it would over such links.

        sum of a bucket   |=== really ===|.......| due: `Ring.all_reduce_ms` of its bytes over the links around

    Args:
        ring: how it moves bytes. around: the condition of each link, from each replica to the next.
        conditions: in whose time they are.
    """

    def __init__(self, ring: Ring, around: Sequence[LinkCondition | None], conditions: Conditions) -> None:
        self._ring, self._around, self._conditions = ring, tuple(around), conditions
        self._free = 0

    def due(self, num_bytes: float) -> int:
        """When a sum that begins now, or after the one before, ends (nanoseconds of the monotonic clock)."""
        begin = max(time.perf_counter_ns(), self._free)
        ms = self._ring.all_reduce_ms(num_bytes, self._around, 0.0, (begin - self._conditions.origin) / 1e6)
        self._free = begin + round(ms * 1e6)
        return self._free


def sleep_until(due: int) -> None:
    """Returns at a moment of the monotonic clock (ns)."""
    while (left := due - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)


def probed_besides(links: Links, conditions: Conditions) -> dict[tuple[int, int], float]:
    """What injected conditions add to a probe now (ms), by two nodes, the lower one first."""
    at = (time.perf_counter_ns() - conditions.origin) / 1e6
    pairs = {(min(pair), max(pair)) for pair in links.conditions}
    return {(a, b): links.delay_of(a, b, 0.0, at, LinkQueue(at, at)).arrived - at for a, b in pairs}
