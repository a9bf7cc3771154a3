"""A delegate process: where it starts, its ties to its rank, and all that it does for it.

The ties are the rings of orders and notes, the memory where messages lie, the wake-ups, and a pair of sockets by
whose end each process knows of the other's. By that pair the orders come, too, when the ranks have met.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from mmap import MAP_SHARED, mmap

from . import sockets
from .chunks import InStream
from .descriptor import RING_BYTES, Descriptor, DescriptorKind, DescriptorRing, Lane, Slots
from .incoming import InConnection
from .monitor import InterfaceMonitor
from .outgoing import OutLink
from .paths import MS
from .sockets import LONGEST, READ, EventLoop, watch_parent


@dataclass(frozen=True)
class DelegateOrders:
    """What a delegate is started with.

    Attributes:
        rank: whose delegate; parent: its process.
        key: of the run; connections of another run are refused.
        interfaces: our addresses; listeners: a socket on each.
        peers: of every rank, the addresses and ports at which its delegate listens.
        num_lanes: connections to each rank.
        rings: memory with the ring of orders, then that of notes; orders, notes: their wake-ups.
        out_memory, in_memory: where messages lie; out_span, in_span: how much of it is mapped.
        limit: how much of the memory for what comes in may be used.
    """

    rank: int
    parent: int
    key: int
    interfaces: list[str]
    listeners: list[int]
    peers: list[list[tuple[str, int]]]
    num_lanes: int
    rings: int
    orders: int
    notes: int
    out_memory: int
    out_span: int
    in_memory: int
    in_span: int
    limit: int

    def write(self) -> bytes:
        """A line, as `read` reads it. It goes by a pair of sockets: any user of the machine may read a command line,
        and the key is among the orders.
        """
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, lifeline: socket.socket) -> DelegateOrders | None:
        """What `write` wrote; None where the rank ended instead."""
        line = lifeline.makefile("rb").readline()
        if not line.endswith(b"\n"):
            return None
        found = json.loads(line)
        peers = [[(host, port) for host, port in ends] for ends in found.pop("peers")]
        return cls(**found, peers=peers)


class DelegateIO:
    """The rings and the memory, from the delegate's side."""

    def __init__(self, orders: DelegateOrders) -> None:
        rings = mmap(orders.rings, 2 * RING_BYTES, flags=MAP_SHARED)
        self._orders, self._notes = DescriptorRing(rings, 0), DescriptorRing(rings, RING_BYTES)
        self.wake, self._told = orders.orders, orders.notes
        self._backlog: deque[Descriptor] = deque()
        self.out_memory, self.in_memory = (
            memoryview(mmap(descriptor, span, flags=MAP_SHARED))
            for descriptor, span in ((orders.out_memory, orders.out_span), (orders.in_memory, orders.in_span))
        )
        self._out_words = self.out_memory.cast("Q")

    def filled(self, offset: int) -> int:
        """How many bytes of its body the rank has written into an outgoing message's slot."""
        return self._out_words[offset // 8]

    def orders(self) -> Iterator[Descriptor]:
        """What the rank ordered since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        while self._backlog and self._notes.put(self._backlog[0]):
            self._backlog.popleft()
            os.eventfd_write(self._told, 1)
        while (descriptor := self._orders.take()) is not None:
            yield descriptor

    def tell(self, descriptor: Descriptor) -> None:
        """Tells the rank, now or when the ring has room again."""
        if self._backlog or not self._notes.put(descriptor):
            self._backlog.append(descriptor)
        else:
            os.eventfd_write(self._told, 1)


class Delegate:
    """The process: a link to each rank, and the connections that come in."""

    def __init__(self, orders: DelegateOrders, lifeline: socket.socket) -> None:
        self.orders = orders
        self.loop = EventLoop()
        watch_parent(self.loop, orders.parent, lifeline.fileno())
        self.io = DelegateIO(orders)
        self.monitor = InterfaceMonitor(orders.interfaces)
        self._links: dict[int, OutLink] = {}
        self.streams: dict[int, InStream[InConnection]] = {}
        self._connections: set[InConnection] = set()
        self._slots = Slots(orders.limit, orders.in_span)
        self._messages: dict[tuple[int, int], tuple[int, int, int]] = {}  # (source, number) -> slot, ready since when
        self._starved: list[InConnection] = []
        for number in orders.listeners:
            listener = socket.socket(fileno=number)
            listener.setblocking(False)
            self.loop.watch(number, READ, partial(self._accept, listener))

    @classmethod
    def main(cls) -> None:
        """Runs a delegate until its rank ends. The first argument says by which socket its orders come."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
        lifeline = socket.socket(fileno=int(sys.argv[1]))
        lifeline.send(b"\n")  # it has started
        orders = DelegateOrders.read(lifeline)
        if orders is not None:
            gc.freeze()
            cls(orders, lifeline).run()

    def run(self) -> None:
        """Runs forever."""
        self.loop.watch(self.io.wake, READ, self._on_orders)
        if self.monitor.socket is not None:
            self.loop.watch(self.monitor.socket.fileno(), READ, self._on_news)
        self._on_orders(READ)
        self.loop.run(self._turn)

    def _turn(self, now: int) -> int:
        """Does what is due; returns when to be called again."""
        every: list[OutLink | InConnection] = [*self._links.values(), *self._connections]
        return min([each.turn(now) for each in every], default=now + LONGEST)

    def _on_orders(self, mask: int) -> None:
        has_room = False
        for order in self.io.orders():
            if order.kind is DescriptorKind.SEND:
                self._link(order.lane.target).stream.give(order)
            elif order.kind is DescriptorKind.CONNECT:
                self._link(order.lane.target)
            elif order.kind is DescriptorKind.GRANT:
                self._slots.grant(order.number)
                has_room = True
            elif order.kind is DescriptorKind.FREE:
                self._slots.free(order.offset, order.capacity)
                self._slots.grant(-order.number)
                has_room = True
        for link in self._links.values():
            link.push()
        if has_room:
            starved, self._starved = self._starved, []
            for connection in starved:
                connection.fed()

    def _on_news(self, mask: int) -> None:
        for place, up in self.monitor.changes():
            for link in self._links.values():
                link.interface(place, up, time.perf_counter_ns())

    def _link(self, target: int) -> OutLink:
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = OutLink(self, target)
        return link

    # What connections ask for.

    def _accept(self, listener: socket.socket, mask: int) -> None:
        try:
            made, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(10 * MS / 1e9)  # the connection waits in the listener's queue meanwhile
            return
        sockets.tune(made)
        self._connections.add(InConnection(self, made, time.perf_counter_ns()))

    def greeted(self, source: int) -> None:
        """A rank has connected: so do we, by which it is known whether its process is there."""
        self.streams.setdefault(source, InStream())
        self._link(source)

    def closed(self, connection: InConnection) -> None:
        self._connections.discard(connection)
        if connection in self._starved:
            self._starved.remove(connection)

    def theirs_down(self, source: int, place: int) -> None:
        """Another rank says that an interface of its own is down."""
        self._link(source).theirs_down(place, time.perf_counter_ns())

    def starve(self, connection: InConnection, num_bytes: int) -> None:
        """A message waits for room."""
        self._starved.append(connection)
        self.io.tell(Descriptor(DescriptorKind.STARVED, Lane(0, self.orders.rank), num_bytes))

    def place(self, chunk: Descriptor, has_waited: bool) -> memoryview | None:
        """Where a chunk's bytes go; None without room for its message. `has_waited`: there was none before."""
        key = chunk.lane.source, chunk.number
        found = self._messages.get(key)
        if found is None:
            slot = self._slots.take(chunk.body_bytes)
            if slot is None:
                return None
            found = self._messages[key] = *slot, time.perf_counter_ns() if has_waited else chunk.sent
        at = found[0] + chunk.offset
        return self.io.in_memory[at : at + chunk.capacity]

    def deliver(self, chunk: Descriptor, arrived: int) -> None:
        """All of a message is there."""
        offset, capacity, ready = self._messages.pop((chunk.lane.source, chunk.number))
        self.io.tell(
            chunk._replace(
                kind=DescriptorKind.MESSAGE,
                lane=chunk.lane._replace(place=0),
                start=ready,
                arrived=arrived,
                offset=offset,
                capacity=capacity,
            )
        )
