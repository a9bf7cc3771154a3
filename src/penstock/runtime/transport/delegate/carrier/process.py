"""A delegate process: where it starts, its ties to its rank, and all that it does for it.

The ties are the memory where messages lie, and a pair of sockets for orders and notes, by whose end each process
knows of the other's. The orders that it starts with come by its standard input, when the ranks have met.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from mmap import MAP_SHARED, mmap

from .frames import BEAT, READ, Descriptor, DescriptorKind, EventLoop, Slots, SocketStream, frames
from .lanes import InLane, InStream, OutLink

KEEPALIVE_S = 16
"""Seconds after which the kernel asks whether the sender of a silent connection is there."""


@dataclass(frozen=True)
class DelegateOrders:
    """What a delegate is started with.

    Attributes:
        rank: whose delegate it is. parent: the rank's process.
        key: of the run; connections of another run are refused.
        listeners: a socket on each of our addresses.
        peers: of every rank, the addresses and ports at which its delegate listens.
        num_lanes: connections to each rank.
        out_memory, in_memory: where messages lie: a descriptor, and how much of it is mapped.
        limit: how many bytes of the memory for what comes in may be used.
    """

    rank: int
    parent: int
    key: int
    listeners: list[int]
    peers: list[list[tuple[str, int]]]
    num_lanes: int
    out_memory: tuple[int, int]
    in_memory: tuple[int, int]
    limit: int

    def to_bytes(self) -> bytes:
        """A line for the standard input. Any user of the machine may read a command line, and the key is secret."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Delegate:
    """The process: a link to each rank, and the connections that come in."""

    def __init__(self, orders: DelegateOrders, line: socket.socket) -> None:
        self.orders = orders
        self.loop = EventLoop()
        self.out_memory, self._in_memory = (
            memoryview(mmap(descriptor, span, flags=MAP_SHARED))
            for descriptor, span in (orders.out_memory, orders.in_memory)
        )
        self._links: dict[int, OutLink] = {}
        self.streams: defaultdict[int, InStream] = defaultdict(InStream)
        """What comes in, by the rank from which."""
        self._incoming: set[InLane] = set()
        self._slots = Slots(orders.limit, orders.in_memory[1])
        self._messages: dict[tuple[int, int], tuple[int, int, int]] = {}
        """By source and number: the slot of a message that comes in, and when there was room."""
        self._starved: list[InLane] = []
        self._due = 0
        self._line = SocketStream(self.loop, line, self._on_orders, os._exit)
        self._came = bytearray()
        # The rank's end, however it ends, is known by its process, too: what it forked may hold its end of the line.
        with contextlib.suppress(OSError):
            self.loop.watch(os.pidfd_open(orders.parent), READ, lambda _: os._exit(0))
        if os.getppid() != orders.parent:
            os._exit(0)
        for number in orders.listeners:
            listener = socket.socket(fileno=number)
            listener.setblocking(False)
            self.loop.watch(number, READ, partial(self._accept, listener))

    @classmethod
    def main(cls) -> None:
        """Runs a delegate until its rank ends. The first argument is the socket of the line to the rank."""
        line = socket.socket(fileno=int(sys.argv[1]))
        line.send(b"\n")  # it has started
        orders = sys.stdin.buffer.readline()
        if orders:  # else its rank has ended
            gc.freeze()
            delegate = cls(DelegateOrders(**json.loads(orders)), line)
            delegate.loop.run(delegate._turn)

    def hurry(self) -> None:
        """Something is due: a connection that should be made again, most likely."""
        self._due = 0

    def tell(self, note: Descriptor) -> None:
        """Tells the rank."""
        self._line.put(note.to_bytes())

    def link(self, target: int) -> OutLink:
        """The link to a rank, which connects."""
        if target not in self._links:
            self._links[target] = OutLink(self, target)
            self.hurry()
        return self._links[target]

    def _turn(self, now: int) -> int:
        """Does what is due; returns when to be called again."""
        if now >= self._due:
            self._due = now + BEAT
            every: list[OutLink | InLane] = [*self._links.values(), *self._incoming]
            for each in every:
                each.turn(now)
        return self._due

    def _on_orders(self, mask: int) -> None:
        self._came += self._line.receive()
        has_room, links = False, set()
        for order in frames(self._came):
            if order.kind is DescriptorKind.FREE:
                self._slots.free(order.offset, order.capacity)
                has_room = True
            elif order.kind is DescriptorKind.GRANT:
                self._slots.limit += order.number
                has_room = True
            else:
                link = self.link(order.target)
                links.add(link)
                if order.kind is DescriptorKind.SEND:
                    link.stream.give(order)
        for link in links:
            link.push()
        if has_room:
            starved, self._starved = self._starved, []
            for lane in starved:
                lane.fed()

    # What connections ask for.

    def _accept(self, listener: socket.socket, mask: int) -> None:
        with contextlib.suppress(OSError):
            made, _ = listener.accept()
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The other end may be gone without a word.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            self._incoming.add(InLane(self, made))

    def closed(self, lane: InLane) -> None:
        self._incoming.discard(lane)
        if lane in self._starved:
            self._starved.remove(lane)

    def starve(self, lane: InLane, num_bytes: int) -> None:
        """A message waits for room."""
        self._starved.append(lane)
        self.tell(Descriptor(DescriptorKind.STARVED, number=num_bytes))

    def place(self, chunk: Descriptor, has_waited: bool) -> memoryview | None:
        """Where a chunk's bytes go; None without room for its message. `has_waited`: there was none before."""
        key = chunk.source, chunk.number
        if key not in self._messages:
            slot = self._slots.take(chunk.body_bytes)
            if slot is None:
                return None
            self._messages[key] = *slot, time.perf_counter_ns() if has_waited else chunk.sent
        at = self._messages[key][0] + chunk.offset
        return self._in_memory[at : at + chunk.capacity]

    def deliver(self, chunk: Descriptor) -> None:
        """All of a message is there."""
        arrived = time.perf_counter_ns()
        offset, capacity, ready = self._messages.pop((chunk.source, chunk.number))
        kind = DescriptorKind.MESSAGE
        self.tell(chunk._replace(kind=kind, start=ready, arrived=arrived, offset=offset, capacity=capacity))
