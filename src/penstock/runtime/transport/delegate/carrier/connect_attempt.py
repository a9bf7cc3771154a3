"""A connection that is being made."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from . import sockets
from .event_loop import Loop
from .paths import Path


@dataclass
class ConnectAttempt:
    """Attributes:
    socket: it becomes writable when it stands, or failed.
    deadline: nanoseconds of the monotonic clock.
    """

    loop: Loop
    path: Path
    socket: socket.socket
    deadline: int

    def settle(self) -> None:
        """It stands: its user watches it from now on."""
        self.loop.forget(self.socket.fileno())

    def close(self) -> None:
        self.loop.forget(self.socket.fileno())
        sockets.close(self.socket)
