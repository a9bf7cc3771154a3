"""Looks for a rank that should connect and does not: where nobody listens any more, its process has ended.

A connection that went may be one that will come back over another interface, so its end proves nothing. That the
other rank's host is there and refuses to connect does: its listeners last as long as its process.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from . import sockets, timing
from .event_loop import WRITE
from .frame import Lane
from .ring import CloseReason, Descriptor, Note

if TYPE_CHECKING:
    from .incoming import Receiver


class PeerWatch:
    """Over one lane, while no connection carries it."""

    def __init__(self, receiver: Receiver, lane: Lane) -> None:
        self._receiver, self._lane = receiver, lane
        self._due: int | None = None
        self._probe: socket.socket | None = None
        self._number = 0
        self._told = False

    def wait(self, now: int) -> None:
        """No connection from now on."""
        self._due = now + timing.PROBE

    def connected(self) -> None:
        self._due, self._told = None, False
        self._end()

    def turn(self, now: int) -> int:
        """Looks, when it is time; returns when it is next."""
        if self._due is None:
            return now + timing.LONGEST
        if now < self._due:
            return self._due
        self._end()
        self._due = now + timing.PROBE
        orders = self._receiver.orders
        theirs = orders.presence[self._lane.source]
        path = self._number % len(orders.interfaces), self._number % len(theirs)
        self._number += 1
        made, error = sockets.begin_connect(orders.interfaces[path[0]], theirs[path[1]])
        if made is None:
            self._judge(sockets.meaning(error))
            return self._due
        self._probe = made
        self._receiver.loop.watch(made.fileno(), WRITE, self._answered)
        return self._due

    def _answered(self, mask: int) -> None:
        assert self._probe is not None
        error = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._end()
        if error:
            self._judge(sockets.meaning(error))

    def _judge(self, why: CloseReason) -> None:
        if why is CloseReason.REFUSED and not self._told:
            self._told = True
            self._receiver.home.tell(Descriptor(Note.REFUSED, self._lane, why))

    def _end(self) -> None:
        if self._probe is not None:
            self._receiver.loop.forget(self._probe.fileno())
            sockets.close(self._probe)
            self._probe = None
