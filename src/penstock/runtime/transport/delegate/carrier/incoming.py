"""A delegate that receives: takes connections in on every interface, and puts messages into slots as they come.

the sending delegate of rank 0 --DATA--> | lane 0->1: last 6 | --MESSAGE--> rank
                               <-ANSWER- |                   | <---FREE----
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from . import sockets, timing
from .delegate_io import DelegateIO, DelegateOrders
from .event_loop import MS, READ, Loop, watch_parent
from .frame import Lane
from .in_connection import InConnection
from .lane import Receiving
from .link_down_notice import LinkDownNotice
from .monitor import Monitor
from .peer_watch import PeerWatch
from .ring import CloseReason, Descriptor, Note
from .slots import Slots


class Receiver:
    """The lanes and connections of one receiving delegate."""

    def __init__(self, orders: DelegateOrders) -> None:
        self.orders = orders
        self.loop = Loop()
        watch_parent(self.loop, orders.parent, orders.lifeline)
        self.home = DelegateIO(orders)
        self.monitor = Monitor(orders.interfaces)
        self.slots = Slots(orders.limit, orders.span, orders.taken)
        self.lanes = {orders.lane(s, t): Receiving(last) for s, t, last in orders.lanes}
        self.connections: set[InConnection] = set()
        self._watches: dict[Lane, PeerWatch] = {}
        self._heralds: list[LinkDownNotice] = []
        self._starved: list[InConnection] = []
        for place, number in enumerate(orders.listeners):
            listener = socket.socket(fileno=number)
            listener.setblocking(False)
            self.loop.watch(number, READ, self._acceptor(listener, place))
        self.loop.watch(self.home.wake, READ, self._on_commands)
        if self.monitor.socket is not None:
            self.loop.watch(self.monitor.socket.fileno(), READ, self._on_news)
        self._on_commands(READ)

    def run(self) -> None:
        self.loop.run(self._turn)

    def _turn(self, now: int) -> int:
        when = now + timing.LONGEST
        for connection in list(self.connections):
            when = min(when, connection.turn(now))
        for watch in self._watches.values():
            when = min(when, watch.turn(now))
        self._heralds = [herald for herald in self._heralds if not herald.done]
        for herald in self._heralds:
            when = min(when, herald.turn(now))
        return when

    def _acceptor(self, listener: socket.socket, place: int) -> Callable[[int], None]:
        return lambda mask: self._accept(listener, place)

    def _accept(self, listener: socket.socket, place: int) -> None:
        while True:
            try:
                made, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(10 * MS / 1e9)  # the connection waits in the listener's queue meanwhile
                return
            sockets.tune(made)
            self.connections.add(InConnection(self, made, place, time.perf_counter_ns()))

    def greeted(self, connection: InConnection, lane: Lane, epoch: int) -> int:
        """A connection says which lane it carries: closes older ones; returns the last message that is there."""
        state = self.lanes.get(lane, Receiving()).hello(epoch)
        self.lanes[lane] = state
        for other in list(self.connections):
            if other is not connection and other.lane == lane:
                other.close(CloseReason.CLOSED, lost=False)
        self._watches.setdefault(lane, PeerWatch(self, lane)).connected()
        return state.last

    def gone(self, connection: InConnection) -> None:
        """A connection was closed."""
        self.connections.discard(connection)
        if connection in self._starved:
            self._starved.remove(connection)

    def cut(self, lane: Lane) -> None:
        """The connection that carried a lane is gone."""
        self._watches[lane].wait(time.perf_counter_ns())

    def starve(self, connection: InConnection, num_bytes: int) -> None:
        """A message waits for room."""
        self._starved.append(connection)
        self.home.tell(Descriptor(Note.STARVED, self.orders.lane(0, self.orders.rank), num_bytes))

    def _on_commands(self, mask: int) -> None:
        room = False
        for descriptor in self.home.commands():
            if descriptor.note is Note.FREE:
                self.slots.free(descriptor.offset, descriptor.capacity)
                self.slots.grant(-descriptor.number)
                room = True
            elif descriptor.note is Note.GRANT:
                self.slots.grant(descriptor.number)
                room = True
            elif descriptor.note is Note.EXPECT and descriptor.lane not in self._watches:
                self._watches[descriptor.lane] = watch = PeerWatch(self, descriptor.lane)
                watch.wait(time.perf_counter_ns())
        if room:
            starved, self._starved = self._starved, []
            for connection in starved:
                connection.fed()

    def _on_news(self, mask: int) -> None:
        for place, up in self.monitor.changes():
            self.home.tell(Descriptor(Note.UP if up else Note.DOWN, self.orders.lane(0, self.orders.rank), tag=place))
            if not up:
                for connection in list(self.connections):
                    if connection.place == place:
                        connection.close(CloseReason.INTERFACE_DOWN)
                for lane in {lane.source: lane for lane in self.lanes}.values():
                    self._heralds.append(LinkDownNotice(self, lane, place))
