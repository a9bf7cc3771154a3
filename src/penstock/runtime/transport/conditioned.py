"""Link conditions injected into a run: what is sent is held back until the moment it is to leave or arrive.

    rank --send--> Lines: when does it arrive? --> held until then --> the real transport --> the other rank

Holding never blocks the sender. What the real transport takes comes on top: conditions make links worse, never
better. Between processes messages are held where they are sent, by one thread that sleeps until the next is due,
so that no clocks need to agree; in one process they are held where they arrive.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from penstock.cost.links import Lines, Links
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.channel import Outgoing
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.loopback import LoopbackTransport, Switchboard, nothing_comes
from penstock.runtime.transport.nccl import NcclTransport
from penstock.runtime.transport.transfer_record import CrossingLog, TransferRecord
from penstock.runtime.transport.wire_format import Packet

LINGER = 5.0
"""Seconds that the thread stays after the last message, for the next."""


class Conditions:
    """Link conditions at work.

    Args:
        stretch: seconds of the clock to one second of the conditions' time.
        origin: when the conditions' time starts, in nanoseconds of the monotonic clock; now where not given.
    """

    def __init__(self, conditions: Links, stretch: float = 1.0, origin: int | None = None) -> None:
        self._lines = Lines(conditions)
        self._takes_up = threading.Lock()  # half-duplex queues have senders in two threads
        self._stretch = stretch * 1e6
        self.origin = time.perf_counter_ns() if origin is None else origin

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
        return self._lines.links.named(source, target)[1] is not None

    def due(self, source: int, target: int, num_bytes: float, sent: int | None = None) -> int:
        """When a message sent at `sent`, or now, is to arrive, in nanoseconds of the monotonic clock. Takes it up."""
        sent = time.perf_counter_ns() if sent is None else sent
        now = (sent - self.origin) / self._stretch
        with self._takes_up:
            arrived = self._lines.arrival(source, target, num_bytes, now)
        return max(sent, self.origin + int(arrived * self._stretch))


def size_of(payload: Payload) -> int:
    """Bytes of what a payload carries."""
    return sum(leaf.numel() * leaf.element_size() for leaf in payload.leaves if leaf is not None)


class HeldSend:
    """A send that may not have begun; to wait for as for any other."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._work: Any = None
        self._error: BaseException | None = None

    def begin(self, send: Callable[[], Any]) -> None:
        try:
            self._work = send()
        except BaseException as error:
            self._error = error
        self._begun.set()

    def wait(self, limit: timedelta) -> None:
        end = time.monotonic() + limit.total_seconds()
        if not self._begun.wait(limit.total_seconds()):
            raise RuntimeError("timed out: the message was held back longer than that")
        if self._error is not None:
            raise self._error
        self._work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))


class Holder:
    """Begins sends when they are due, those due together in the order in which they were given."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, HeldSend, Callable[[], Any]]] = []
        self._changed = threading.Condition()
        self._number = 0
        self._runs = False

    def hold(self, due: int, send: Callable[[], Any]) -> HeldSend:
        """Begins `send` at `due` (nanoseconds of the monotonic clock)."""
        held = HeldSend()
        with self._changed:
            heapq.heappush(self._waiting, (due, self._number, held, send))
            self._number += 1
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="penstock-held-messages", daemon=True).start()
            elif self._waiting[0][2] is held:
                self._changed.notify()
        return held

    def _work(self) -> None:
        while True:
            with self._changed:
                while True:
                    if not self._waiting:
                        if not self._changed.wait(LINGER) and not self._waiting:
                            self._runs = False
                            return
                    elif (left := self._waiting[0][0] - time.perf_counter_ns()) > 0:
                        self._changed.wait(left / 1e9)
                    else:
                        break
                _, _, held, send = heapq.heappop(self._waiting)
            held.begin(send)


class ConditionedTransport(GlooTransport):
    """A `GlooTransport` whose messages are held back as the conditions say."""

    def __init__(self, *args: Any, conditions: Conditions) -> None:
        super().__init__(*args)
        self.conditions = conditions
        self._holder = Holder()
        self._due: int | None = None

    def _hand_over(self, target: int, payload: Payload) -> int:
        sent = super()._hand_over(target, payload)
        conditions = self.conditions
        held = conditions.hold(self._rank, target)
        self._due = conditions.due(self._rank, target, size_of(payload), sent) if held else None
        return sent

    def _isend(self, buffer: Tensor, target: int, tag: int) -> Any:
        # All parts of a message, shapes too, become due together and stay in order.
        return self._later(partial(super()._isend, buffer, target, tag))

    def _later(self, send: Callable[[], Any]) -> Any:
        return send() if self._due is None else self._holder.hold(self._due, send)


class ConditionedLines(ConditionedTransport, NcclTransport):
    """A `NcclTransport` whose messages are held back as the conditions say."""

    def _send_packet(self, channel: Outgoing, packet: Packet, tag: int) -> Any:
        return self._later(partial(NcclTransport._send_packet, self, channel, packet, tag))


class Delayed(NamedTuple):
    """A message on a switchboard that is not yet due. In the order in which they are, then of sending."""

    due: int
    number: int
    edge: Edge
    crossing: TransferRecord


class ConditionedSwitchboard(Switchboard):
    """A switchboard that keeps what is not yet due, of unbounded depth."""

    def __init__(self, num_ranks: int, conditions: Conditions) -> None:
        super().__init__(num_ranks, None)
        self.conditions = conditions
        self.waiting: list[list[Delayed]] = [[] for _ in range(num_ranks)]
        self.num_sent = 0

    def pause(self) -> bool:
        """Sleeps until the next message is due; returns False where none is on its way."""
        due = min((queue[0].due for queue in self.waiting if queue), default=None)
        if due is None:
            return False
        time.sleep(max(0, due - time.perf_counter_ns()) / 1e9)
        return True


class ConditionedLocalTransport(LoopbackTransport):
    """One rank's end of a switchboard with conditions."""

    def __init__(self, board: ConditionedSwitchboard, rank: int) -> None:
        super().__init__(board, rank)
        self._delayed = board
        self._log = CrossingLog()

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        super().send(edge, target, payload)
        board = self._delayed
        board.arrived[target].remove(edge)
        board.num_sent += 1
        sent, num_bytes = time.perf_counter_ns(), size_of(payload)
        due = board.conditions.due(self._rank, target, num_bytes, sent)
        crossing = TransferRecord(self._rank, target, num_bytes, sent, sent, due)
        heapq.heappush(board.waiting[target], Delayed(due, board.num_sent, edge, crossing))
        return True

    def arrivals(self) -> list[Edge]:
        queue = self._delayed.waiting[self._rank]
        now = time.perf_counter_ns()
        came = []
        while queue and queue[0].due <= now:
            delayed = heapq.heappop(queue)
            self._log.add(delayed.crossing)
            came.append(delayed.edge)
        return came

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call. Each arrived when it was due."""
        return self._log.take()


def local_transports(
    num_ranks: int, conditions: Conditions | None
) -> tuple[Callable[[int], LoopbackTransport], Callable[[], bool]]:
    """What makes the ends of a new switchboard, by rank, and what waits for the next message on it."""
    if conditions is None:
        return partial(LoopbackTransport, Switchboard(num_ranks, None)), nothing_comes
    board = ConditionedSwitchboard(num_ranks, conditions)
    return partial(ConditionedLocalTransport, board), board.pause
