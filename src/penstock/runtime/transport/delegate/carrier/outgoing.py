"""A delegate that sends: for every lane a connection, over the best interface that works.

rank --SEND--> | lane 0->1: 4 5 6 | --DATA--> the receiving delegate of rank 1
     <-ANSWERED|                  | <-ANSWER-
"""

from __future__ import annotations

import time

from .delegate_io import DelegateIO, DelegateOrders
from .event_loop import READ, Loop, watch_parent
from .frame import Lane
from .monitor import Monitor
from .out_lane import OutLane
from .ring import Descriptor, Note
from .timing import LONGEST


class Sender:
    """The lanes of one sending delegate."""

    def __init__(self, orders: DelegateOrders) -> None:
        self.orders = orders
        self.loop = Loop()
        watch_parent(self.loop, orders.parent, orders.lifeline)
        self.home = DelegateIO(orders)
        self.monitor = Monitor(orders.interfaces)
        self._lanes: dict[Lane, OutLane] = {}
        self.loop.watch(self.home.wake, READ, self._on_commands)
        if self.monitor.socket is not None:
            self.loop.watch(self.monitor.socket.fileno(), READ, self._on_news)
        self._on_commands(READ)

    def run(self) -> None:
        self.loop.run(self._turn)

    def _turn(self, now: int) -> int:
        return min((lane.turn(now) for lane in self._lanes.values()), default=now + LONGEST)

    def _on_commands(self, mask: int) -> None:
        for descriptor in self.home.commands():
            if descriptor.note is Note.THEIRS_DOWN:
                for one in self._lanes.values():
                    if one.lane.target == descriptor.lane.target:
                        one.theirs_down(descriptor.tag, time.perf_counter_ns())
                continue
            lane = self._lanes.get(descriptor.lane)
            if lane is None:
                before = descriptor.number - (descriptor.note is Note.SEND)
                lane = self._lanes[descriptor.lane] = OutLane(self, descriptor.lane, before)
            if descriptor.note is Note.SEND:
                lane.give(descriptor)

    def _on_news(self, mask: int) -> None:
        for place, up in self.monitor.changes():
            self.home.tell(Descriptor(Note.UP if up else Note.DOWN, self.orders.lane(self.orders.rank, 0), tag=place))
            for lane in self._lanes.values():
                lane.interface(place, up, time.perf_counter_ns())
