"""torch's TCPStore as a store: the one that the job has anyway, or one at an address.

A queue is asked every few milliseconds, and not waited for: torch writes two lines to stderr for every wait that
ends without a value. Before a client is made, a plain socket finds out whether anybody listens, for the same reason.

torch's client waits for an answer forever where the server's process stands still. So the kernel is told to end any
wait of its socket, which is found among those of this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.runtime.adapt.store.store import StoreLost

POLL = 0.02
"""Seconds between two looks at a queue. One takes about 40 us."""
CONNECT = 5.0
"""Seconds for reaching a server that listens, and for any of its answers."""
MARGIN = 0.25
"""Seconds that torch may take to give up by itself."""
_DESCRIPTORS = Path("/proc/self/fd")
_NETWORKS = (socket.AF_INET, socket.AF_INET6)
"""Families of sockets whose other end is a host and a port; one between processes of this host has a name or none."""


class TcpStore:
    """A client of the TCPStore at `host:port`.

    Args:
        others: further addresses of the same store, by other networks: each is tried where the one before is not
            reached (any more).

    Raises:
        StoreLost: nobody listens there, or nobody answers.
    """

    def __init__(self, host: str, port: int, others: Sequence[str] = ()) -> None:
        self._hosts, self._port = [host, *others], port
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._client: dist.TCPStore | None = self._connect()

    def push(self, queue: str, value: bytes) -> None:
        self._do(lambda client: client.queue_push(queue, value))

    def pop(self, queue: str, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        while True:
            found: bytes | None = self._do(lambda client: _pop(client, queue))
            if found is not None:
                return found
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(POLL, left))

    def another(self) -> TcpStore:
        return TcpStore(self._hosts[0], self._port, self._hosts[1:])

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _do(self, call: Callable[[dist.TCPStore], Any]) -> Any:
        client = self._client
        if client is None:
            client = self._client = self._connect()
        try:
            return call(client)
        except RuntimeError as error:
            self._drop()
            raise StoreLost(f"{self._where} is gone: {_first_line(error)}") from None

    @property
    def _where(self) -> str:
        return f"the TCPStore at {' or '.join(self._hosts)}:{self._port}"

    def _drop(self) -> None:
        """Ends the connection, and with it a call that waits for it in another thread."""
        self._client = None
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            _cut(one)

    def _connect(self) -> dist.TCPStore:
        if self._closed:
            raise StoreLost(f"{self._where} was closed here")
        for _ in self._hosts:
            try:
                socket.create_connection((self._hosts[0], self._port), timeout=CONNECT).close()
                break
            except OSError as failed:
                error = failed
                self._hosts.append(self._hosts.pop(0))
        else:
            raise StoreLost(f"{self._where} cannot be reached: {_first_line(error)}")
        if not _connecting.acquire(timeout=2 * CONNECT):
            raise StoreLost(f"{self._where} cannot be reached: it does not answer")
        try:
            before = _sockets_to(self._port)
            client = self._make(before)
            self._sockets = _since(before, self._port)
            for one in self._sockets:
                for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    one.setsockopt(socket.SOL_SOCKET, direction, _timeval(CONNECT))
        finally:
            _connecting.release()
        if self._closed:  # meanwhile
            self._drop()
        return client

    def _make(self, before: Iterable[str]) -> dist.TCPStore:
        """A client. A server that stands still takes the connection and never answers, which torch waits for."""
        made: list[dist.TCPStore] = []
        errors: list[Exception] = []

        def make() -> None:
            limit = timedelta(seconds=CONNECT)
            try:
                made.append(dist.TCPStore(self._hosts[0], self._port, None, False, limit, wait_for_workers=False))
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=make, name="penstock-store", daemon=True)
        thread.start()
        thread.join(CONNECT + MARGIN)
        while thread.is_alive() and (found := _since(before, self._port)):
            for one in found:
                _cut(one)
            thread.join(MARGIN)
        if not made:
            why = _first_line(errors[0]) if errors else f"it has not answered for {CONNECT:g} s"
            raise StoreLost(f"{self._where} cannot be reached: {why}")
        return made[0]


_connecting = threading.Lock()
"""Held while a client connects, so that its socket is known from those of others."""


def _sockets_to(port: int) -> dict[str, int]:
    """This process's sockets that are connected to a port: their names in the kernel, and descriptors. Linux alone
    tells; nothing is found elsewhere, where a server that stands still holds whoever calls.
    """
    found = {}
    for path in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or no connected socket
            name = os.readlink(path)
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family in _NETWORKS and one.getpeername()[1] == port:
                        found[name] = int(path.name)
    return found


def _since(before: Iterable[str], port: int) -> list[socket.socket]:
    """Copies of the descriptors of sockets connected to a port that were not there before."""
    found = []
    for name, number in _sockets_to(port).items():
        if name not in before:
            with contextlib.suppress(OSError):
                found.append(socket.socket(fileno=os.dup(number)))
    return found


def _cut(one: socket.socket) -> None:
    """Ends a connection, for all that wait for it."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _timeval(seconds: float) -> bytes:
    """A time as the kernel takes it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _pop(client: dist.TCPStore, queue: str) -> bytes | None:
    try:
        return client.queue_pop(queue, False)
    except dist.QueueEmptyError:
        return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
