"""Injects link conditions into a run: when a message counts as arrived, and how many may be under way (`depth`).

    sender    --send--> Conditions: when is it to arrive? --message, with that moment--> the transport that carries
    receiver  <--arrivals-- kept until that moment <-- the transport that carries

Without a depth nothing waits on the sender's side. The message is there early, where the rank does not see it yet.
If it takes longer to carry, it arrives later: conditions make links worse, never better. The moment is given by the
sender's clock; ranks on other hosts know how far that clock is ahead of theirs.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from penstock.cost import LinkCondition, Ring
from penstock.cost.links import LinkQueues, Links
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import CrossingLog, StepMessages, TransferRecord, Transport


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
        links = self._lines.links
        shared = [f"{a}:{b}" for (a, b), each in links.conditions.items() if each.half_duplex]
        shared += ["default"] if links.default is not None and links.default.half_duplex else []
        if shared:
            raise RuntimeFailure(
                f"link {shared[0]} is half-duplex: both directions share a queue, which the processes at its ends "
                "cannot; emulate it with threads or leave half-duplex out"
            )

    def hold(self, source: int, target: int) -> bool:
        """Whether there is a condition from one rank to another at all."""
        links = self._lines.links
        return links.base > 0 or links.named(source, target)[1] is not None

    def due(self, source: int, target: int, num_bytes: float, sent: int, in_turn: bool = False) -> int:
        """When a message sent at `sent` is to arrive, both in nanoseconds of the monotonic clock. Takes it up.

        Args:
            in_turn: the next message of the same direction leaves only when this one has arrived.
        """
        now = (sent - self.origin) / self._stretch
        with self._takes_up:
            arrived = self._lines.arrival(source, target, num_bytes, now, in_turn)
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
        record: None where nobody knows how long its link took.
    """

    due: int
    number: int
    edge: Edge
    record: TransferRecord | None


class ConditionedTransport:
    """A transport in front of another one, whose messages arrive when the conditions say.

    With a depth, a message that finds as many others on its link waits at its sender, which starts nothing else. This
    is the head-of-line blocking of the PipeMorph paper, section 3.2, and `ps.Blocking(depth)` in the simulator. It
    never lasts: a message arrives when the conditions say, whether its receiver looks or not.

        rank 0   |F0|F1|F2|............|F3|      depth 2: F2's message finds two under way and waits for room, and
                   `----. `----.       ^         F3, though it is ready, is not started
                         v      v      |
        rank 1          .|F0|----- arrived

    Args:
        inner: the transport that carries.
        conditions: of the links, the same on all ranks.
        ahead: by how many nanoseconds this rank's clock is ahead of each other rank's; one clock where not given.
        depth: how many messages to another rank the conditions hold at most. Gradients of tied parameters do not
            count, because they travel with other messages. None: any number.
        hands_over: the inner transport crosses no link, and so records nothing. Then messages of links that may turn
            late are recorded here even while they are on time. Without these records the first delay would be taken
            for the link's usual one, and not for a change.
        in_turn: each link that is not delegated carries one message at a time, as a line of NCCL does.
    """

    def __init__(
        self,
        inner: Transport,
        conditions: Conditions,
        ahead: Sequence[int] = (),
        depth: int | None = None,
        hands_over: bool = False,
        in_turn: bool = False,
    ) -> None:
        self.inner, self.rank = inner, inner.rank
        self.end, self.close = inner.end, inner.close
        self._conditions, self._ahead, self._hands_over = conditions, ahead, hands_over
        self._depth, self._in_turn = depth, in_turn
        self._delegated: set[int] = set()
        self._under_way: dict[int, deque[int]] = {}
        """By rank, when the messages to it are to arrive."""
        self._full: deque[int] | None = None
        self._refused: tuple[Edge, int, MessageStamp] | None = None
        self._records: dict[Edge | None, TransferRecord] = {}
        self._held: list[HeldArrival] = []
        self._ready: dict[Edge, Payload] = {}
        self._num_carried = 0
        self._woken = False
        self._log = CrossingLog()

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links are delegated from now on, by their two ranks in either order. They
        have no bound, and messages on them do not wait for each other.
        """
        self._delegated = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def begin(self, step: StepMessages) -> None:
        self._full = self._refused = None
        self.inner.begin(replace(step, threaded=True))

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Sends. Returns False if the channel is full, or if the transport that carries has no room. In that case the
        message has its place on the link already, and keeps it for the next try.
        """
        if edge.slot <= 0 and not self._has_room(target):
            return False
        if self._refused is not None and self._refused[:2] == (edge, target):
            stamp = self._refused[2]
        else:
            sent = due = time.perf_counter_ns()
            if self._conditions.hold(self.rank, target):
                in_turn = self._in_turn and target not in self._delegated
                due = self._conditions.due(self.rank, target, size_of(payload), sent, in_turn)
            stamp = MessageStamp(self.rank, sent, due)
        if not self.inner.send(edge, target, stamp.put_on(payload)):
            self._refused = edge, target, stamp
            return False
        self._refused = None
        if self._depth is not None and edge.slot <= 0 and stamp.due > stamp.sent:
            self._under_way.setdefault(target, deque()).append(stamp.due)
        return True

    def _has_room(self, target: int) -> bool:
        """Whether a message to a rank may leave. If not, `wait` returns when it may."""
        self._full = None
        dues = self._under_way.get(target)
        if self._depth is None or not dues:
            return True
        now = time.perf_counter_ns()
        while dues and dues[0] <= now:
            dues.popleft()
        if len(dues) < self._depth or target in self._delegated:
            return True
        self._full = dues
        return False

    def arrivals(self) -> list[Edge]:
        self._keep(self.inner.arrivals())
        return self._due_by_now()

    def _keep(self, edges: Sequence[Edge]) -> None:
        """Takes in what was carried here."""
        if not edges:
            return
        self._records |= {record.edge: record for record in self.inner.crossings()}
        for edge in edges:
            payload = self._ready[edge] = self.inner.take(edge)
            stamp, size = MessageStamp.take_off(payload), size_of(payload)
            due = stamp.due + (self._ahead[stamp.source] if self._ahead else 0)
            record = self._records.pop(edge, None)
            if stamp.due > stamp.sent or (self._hands_over and self._conditions.hold(stamp.source, self.rank)):
                arrived = due if record is None else max(due, record.arrived)
                record = TransferRecord(stamp.source, self.rank, size, stamp.sent, stamp.sent, arrived, edge)
            elif record is not None:
                record = record._replace(num_bytes=size)
            heapq.heappush(self._held, HeldArrival(due, self._num_carried, edge, record))
            self._num_carried += 1

    def _due_by_now(self) -> list[Edge]:
        held, came = self._held, []
        if held:
            now = time.perf_counter_ns()
            while held and held[0].due <= now:
                arrival = heapq.heappop(held)
                if arrival.record is not None:
                    self._log.add(*arrival.record)
                came.append(arrival.edge)
        return came

    def dues(self) -> list[int]:
        """When each message that was carried here, and has not come, is to arrive."""
        self._keep(self.inner.arrivals())
        return [arrival.due for arrival in self._held]

    def take(self, edge: Edge) -> Payload:
        return self._ready.pop(edge)

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        while True:
            came = self._due_by_now()
            if came or self._woken:
                self._woken = False
                return came
            moments = [arrival.due for arrival in self._held[:1]]
            if self._full:
                moments.append(self._full[0])
            if until is not None:
                moments.append(until)
            soonest = min(moments, default=None)
            carried = self.inner.wait(awaited, who, soonest)
            self._keep(carried)
            now = time.perf_counter_ns()
            came = self._due_by_now()
            has_room = self._full is not None and self._full[0] <= now
            if has_room:
                self._full = None
            # With nothing carried before that moment, the transport that carries has room again.
            has_room = has_room or (not carried and (soonest is None or now < soonest))
            if came or has_room or (until is not None and until <= now):
                self._woken = False
                return came

    def wake(self) -> None:
        self._woken = True
        self.inner.wake()

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call. Those of links with conditions arrived when these say, or
        when they had been carried, if that was later.
        """
        return self._log.take()


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
