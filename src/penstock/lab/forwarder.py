"""Carries packets between hosts: reads what they send, holds each packet until it is due, and delivers it.

    host 0's eth0 --read--> PacketQueue 0>1 --held until due--> write --> host 1's eth0

It is one thread with a single wait: for packets, for the time when the next one is due, and for other registered
descriptors. It is given the descriptors, so that a test may use sockets in place of TUN devices.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from collections.abc import Callable, Mapping

from penstock.cost import LinkCondition
from penstock.lab.kernel import HEADER_BYTES, KernelTimer, whole_segments
from penstock.lab.layout import Layout, NetworkWay
from penstock.lab.links import WayChange
from penstock.lab.packets import PacketQueue

BURST = 32
"""Packets that are read from one interface before others are read and due packets are delivered."""
_MOST_BYTES = HEADER_BYTES + 65_536
_TARGET = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)
"""Where a packet has its destination address."""


class Forwarder:
    """The networks between a lab's hosts.

    Args:
        devices: of each host's interface on each network, (host, nic) -> descriptor.
        conditions: of ways, from the start.
        segment: tells a device whether to give single segments, so that packets are lost as on a wire.

    Attributes:
        is_ended: whether `end` was called.
    """

    def __init__(
        self,
        layout: Layout,
        devices: Mapping[tuple[int, int], int],
        conditions: Mapping[NetworkWay, LinkCondition],
        segment: Callable[[int, bool], None] = whole_segments,
    ) -> None:
        self.queues = {way: PacketQueue(way) for way in layout.ways()}
        self._devices, self._segment = devices, segment
        self._whole = dict.fromkeys(devices.values(), False)
        places = layout.packed_addresses()
        self._routes = {
            device: {
                address: self.queues[NetworkWay(host, target, nic)]
                for address, (target, target_nic) in places.items()
                if target_nic == nic and target != host
            }
            for (host, nic), device in devices.items()
        }
        self._out = {way: devices[way.target, way.nic] for way in self.queues}
        self._due: list[tuple[float, NetworkWay]] = []
        self._epoll, self._timer, self._armed = select.epoll(), KernelTimer(), 0.0
        self._others: dict[int, Callable[[], None]] = {}
        self.is_ended = False
        for device in devices.values():
            self._epoll.register(device, select.EPOLLIN)
        self._epoll.register(self._timer.descriptor, select.EPOLLIN)
        for way, condition in conditions.items():
            self.change(way, WayChange(condition))

    def change(self, way: NetworkWay, change: WayChange) -> None:
        """Changes the condition of packets that are sent from now on. A cut also loses those under way."""
        self.queues[way].change(change, _now())
        device = self._devices[way.source, way.nic]
        loses = any(queue.loses for queue in self._routes[device].values())
        if loses != self._whole[device]:
            self._whole[device] = loses
            self._segment(device, loses)

    def watch(self, descriptor: int, readable: Callable[[], None]) -> None:
        """Calls `readable` whenever `descriptor` has something to read or its other end is closed."""
        self._others[descriptor] = readable
        self._epoll.register(descriptor, select.EPOLLIN)

    def end(self) -> None:
        """Lets `run` return after this round."""
        self.is_ended = True

    def run(self) -> None:
        """Carries packets until `end`."""
        while not self.is_ended:
            if self._due and self._due[0][0] != self._armed:  # the time when the next packet is due
                self._armed = self._due[0][0]
                self._timer.set(int(self._armed * 1e6))
            for descriptor, event in self._epoll.poll():
                routes = self._routes.get(descriptor)
                if routes is not None:
                    if event & select.EPOLLERR:  # somebody took the whole device away
                        self._epoll.unregister(descriptor)
                        continue
                    self._read(descriptor, routes)
                elif descriptor == self._timer.descriptor:
                    self._timer.clear()
                    self._armed = 0.0
                else:
                    self._others[descriptor]()
            self._deliver()

    def close(self) -> None:
        """Closes what it opened. The devices belong to others."""
        self._epoll.close()
        self._timer.close()

    def _read(self, device: int, routes: Mapping[bytes, PacketQueue]) -> None:
        now = _now()
        for _ in range(BURST):
            try:
                packet = os.read(device, _MOST_BYTES)
            except OSError:  # nothing more, or the interface is down
                return
            queue = routes.get(packet[_TARGET])
            if queue is None:  # for no host of this network: nobody is there to take it
                continue
            due = queue.take(len(packet) - HEADER_BYTES, now)
            if due is None:
                continue
            if due <= now and not queue.held:
                self._write(queue, packet)
                continue
            if not queue.held:
                heapq.heappush(self._due, (due, queue.way))
            queue.held.append((due, packet))

    def _deliver(self) -> None:
        """Delivers what is due."""
        now = _now()
        while self._due and self._due[0][0] <= now:
            _, way = self._due[0]
            queue = self.queues[way]
            while queue.held and queue.held[0][0] <= now:
                self._write(queue, queue.held.popleft()[1])
            if queue.held:
                heapq.heapreplace(self._due, (queue.held[0][0], way))
            else:
                heapq.heappop(self._due)

    def _write(self, queue: PacketQueue, packet: bytes) -> None:
        try:
            os.write(self._out[queue.way], packet)
        except OSError:  # the interface there is down
            queue.num_refused += 1


def _now() -> float:
    """Milliseconds of the monotonic clock."""
    return time.monotonic_ns() * 1e-6
