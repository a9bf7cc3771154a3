"""The store's port, bound before anything starts, so that nobody can take it in between."""

from __future__ import annotations

import errno
import socket

from penstock.runtime.errors import RuntimeFailure

__all__ = ["listen"]

HOST = "127.0.0.1"


def listen(port: int | None) -> socket.socket:
    """A listening socket on loopback; any free port for None. Raises `RuntimeFailure` when the port can't be had."""
    if port is not None and not 0 < port < 65536:
        raise RuntimeFailure(f"port {port}: a port is a number from 1 to 65535; leave it out for any free one")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port or 0))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RuntimeFailure(
                f"port {port} is in use by another program: choose another, or leave it out for any free one"
            ) from None
        raise RuntimeFailure(f"port {port} cannot be used: {error.strerror}; leave it out for any free one") from None
    return listener
