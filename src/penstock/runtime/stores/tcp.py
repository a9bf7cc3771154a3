"""torch's TCPStore as a store: the one that the job has anyway, or one at an address.

A queue is asked every few milliseconds, and not waited for: torch writes two lines to stderr for every wait that
ends without a value. Before a client is made, a plain socket finds out whether anybody listens, for the same reason.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.runtime.stores.store import StoreLost

POLL = 0.02
"""Seconds between two looks at a queue. One takes about 40 us."""
CONNECT = 5.0
"""Seconds for reaching a server that listens."""


class TcpStore:
    """A client of the TCPStore at `host:port`.

    Raises:
        StoreLost: nobody listens there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
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
        return TcpStore(self._host, self._port)

    def close(self) -> None:
        self._client = None

    def _do(self, call: Callable[[dist.TCPStore], Any]) -> Any:
        if self._client is None:
            self._client = self._connect()
        try:
            return call(self._client)
        except RuntimeError as error:
            self._client = None
            raise StoreLost(f"the TCPStore at {self._host}:{self._port} is gone: {_first_line(error)}") from None

    def _connect(self) -> dist.TCPStore:
        where = f"the TCPStore at {self._host}:{self._port}"
        try:
            socket.create_connection((self._host, self._port), timeout=CONNECT).close()
            return dist.TCPStore(
                self._host,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT),
            )
        except (OSError, RuntimeError) as error:
            raise StoreLost(f"{where} cannot be reached: {_first_line(error)}") from None


def _pop(client: dist.TCPStore, queue: str) -> bytes | None:
    try:
        return client.queue_pop(queue, False)
    except dist.QueueEmptyError:
        return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
