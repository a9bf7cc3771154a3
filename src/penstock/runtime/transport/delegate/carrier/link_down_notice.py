"""Tells other ranks, over an interface that works, that one of ours is down.

A rank that sends to a dead interface of another host hears nothing, and would wait until TCP gives up. The host whose
interface it is knows at once, and it is the receiver that can say so: to the socket that shows the sender's presence.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import sockets, timing
from .event_loop import WRITE
from .frame import Frame, FrameKind, Lane, pack
from .paths import Path, by_preference

if TYPE_CHECKING:
    from .incoming import Receiver


class LinkDownNotice:
    """One message to one rank, tried over one path after the other.

    Args:
        lane: from the rank that is told; down: the place of our interface.
    """

    def __init__(self, receiver: Receiver, lane: Lane, down: int) -> None:
        self._receiver, self._lane, self._down = receiver, lane, down
        theirs = receiver.orders.presence[lane.source]
        up = receiver.monitor.interfaces.up
        paths = by_preference(len(up), len(theirs))
        self._paths: Iterator[Path] = iter([path for path in paths if up[path.ours]])
        self._socket: socket.socket | None = None
        self._due = 0
        self.done = False
        self._try(time.perf_counter_ns())

    def turn(self, now: int) -> int:
        """Goes on to the next path where one takes too long; returns when to be called again."""
        if not self.done and now >= self._due:
            self._try(now)
        return self._due

    def _try(self, now: int) -> None:
        self._end()
        orders = self._receiver.orders
        self._due = now + timing.CONNECT
        for path in self._paths:
            made, _ = sockets.begin_connect(
                orders.interfaces[path.ours], orders.presence[self._lane.source][path.theirs]
            )
            if made is not None:
                self._socket = made
                self._receiver.loop.watch(made.fileno(), WRITE, self._connected)
                return
        self.done = True

    def _connected(self, mask: int) -> None:
        assert self._socket is not None
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._try(time.perf_counter_ns())
            return
        frame = Frame(FrameKind.DOWN, self._lane, self._down, self._receiver.orders.key)
        try:
            self._socket.send(pack(frame))
        except OSError:
            self._try(time.perf_counter_ns())
            return
        self._receiver.loop.forget(self._socket.fileno())
        self._socket.close()  # what was sent still goes
        self._socket = None
        self.done = True

    def _end(self) -> None:
        if self._socket is not None:
            self._receiver.loop.forget(self._socket.fileno())
            sockets.close(self._socket)
            self._socket = None
