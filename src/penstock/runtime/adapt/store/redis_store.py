"""Redis as a store: `redis://[user:password@]host:port[/db]`. It needs the extra `redis`.

A command line is for every user of the machine to read; a password in PENSTOCK_STORE_PASSWORD is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from penstock.runtime.adapt.store.store import StoreLost, without_password
from penstock.runtime.errors import RuntimeFailure

EXPIRES = 3600
"""Seconds after which a queue that nobody has touched is forgotten, so that a job that dies leaves nothing behind."""
PASSWORD = "PENSTOCK_STORE_PASSWORD"
"""The environment variable with the password, where the address has none."""
CONNECT = 5.0
"""Seconds for reaching the server, and for any of its answers besides what a call waits for itself."""


class RedisStore:
    """A client of the Redis at `url`.

    Raises:
        RuntimeFailure: redis-py is not installed, or the address is none.
        StoreLost: it cannot be reached, or refuses (it wants a password, say).
    """

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError:
            raise RuntimeFailure(
                f"{without_password(url)}: redis-py is needed for it; pip install 'penstock[redis]'"
            ) from None
        self._url, self._closed = url, False
        self._lost: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        try:
            self._client: Any = redis.Redis.from_url(  # what the address says goes before these
                url,
                password=os.environ.get(PASSWORD),
                socket_timeout=CONNECT,
                socket_connect_timeout=CONNECT,
                retry=None,
                protocol=2,
            )
        except ValueError as error:
            shown = without_password(url)
            # Where a password holds one of : / # ? the reason would quote a piece of it.
            why = f": {error}" if shown == url else ""
            raise RuntimeFailure(
                f"{shown} is no address of a Redis{why}; write redis://HOST:PORT/DB, and : / # ? @ % in a password "
                "percent-encoded"
            ) from None
        self._do(lambda client: client.ping())

    def push(self, queue: str, value: bytes) -> None:
        def call(client: Any) -> None:
            pipe = client.pipeline(transaction=False)
            pipe.rpush(queue, value)
            pipe.expire(queue, EXPIRES)
            pipe.execute()

        self._do(call)

    def pop(self, queue: str, timeout: float) -> bytes | None:
        found = self._do(lambda client: client.blpop([queue], timeout=max(timeout, 0.01)))
        return None if found is None else bytes(found[1])

    def another(self) -> RedisStore:
        return RedisStore(self._url)

    def close(self) -> None:
        self._closed = True
        self._client.connection_pool.disconnect()

    def _do(self, call: Callable[[Any], Any]) -> Any:
        if self._closed:
            raise StoreLost(f"the Redis at {without_password(self._url)} was closed here")
        try:
            return call(self._client)
        except self._lost as error:
            self._client.connection_pool.disconnect()
            raise StoreLost(f"the Redis at {without_password(self._url)} cannot be used: {error}") from None
