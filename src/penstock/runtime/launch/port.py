"""The store's port, bound before anything starts, so that nobody can take it in between."""

from __future__ import annotations

import errno
import socket

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh import interfaces
from penstock.runtime.mesh.interfaces import LOOPBACK

__all__ = ["listen"]

HOST = LOOPBACK


def listen(port: int | None) -> socket.socket:
    """A listening socket on loopback; any free port for None. Raises `RuntimeFailure` when the port can't be had."""
    if port is not None and not 0 < port < 65536:
        raise RuntimeFailure(f"port {port}: a port is a number from 1 to 65535; leave it out for any free one")
    try:
        return interfaces.listen(port or 0, HOST)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeFailure(
                f"port {port} is in use by another program: choose another, or leave it out for any free one"
            ) from None
        raise RuntimeFailure(f"port {port} cannot be used: {error.strerror}; leave it out for any free one") from None
