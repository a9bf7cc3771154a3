"""Connections to a rank's own sockets: from ranks that check whether it is there, or that report on an interface."""

from __future__ import annotations

import contextlib
import socket

from penstock.runtime.transport.delegate.carrier.frame import HEADER_BYTES, Frame, FrameError, FrameKind, unpack

MOST = 64
"""Connections that are open at once."""


class PresenceConnections:
    """Args:
    key: of the run; others' news are no news.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._sockets: dict[int, socket.socket] = {}

    def accept(self, listener: socket.socket) -> int | None:
        """Takes a connection; returns the descriptor to wait for, or None."""
        try:
            made, _ = listener.accept()
        except OSError:
            return None
        made.setblocking(False)
        if len(self._sockets) >= MOST:
            made.close()
            return None
        self._sockets[made.fileno()] = made
        return made.fileno()

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._sockets

    def read(self, descriptor: int) -> Frame | None:
        """What comes over a connection, if it is news. It is closed then."""
        made = self._sockets.pop(descriptor)
        with made, contextlib.suppress(OSError, FrameError):
            data = made.recv(HEADER_BYTES)
            if len(data) == HEADER_BYTES:
                frame = unpack(data)
                if frame.kind is FrameKind.DOWN and frame.tag == self._key:
                    return frame
        return None

    def close(self) -> None:
        for made in self._sockets.values():
            made.close()
        self._sockets.clear()
