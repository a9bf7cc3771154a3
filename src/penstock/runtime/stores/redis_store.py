"""Redis as a store: `redis://[user:password@]host:port[/db]`. It needs the extra `redis`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stores.address import without_password
from penstock.runtime.stores.store import StoreLost

EXPIRES = 3600
"""Seconds after which a queue that nobody has touched is forgotten, so that a job that dies leaves nothing behind."""
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
            raise RuntimeFailure(f"{url}: redis-py is needed for it; pip install 'penstock[redis]'") from None
        self._url = url
        self._lost: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=CONNECT, socket_connect_timeout=CONNECT, retry=None, protocol=2
            )
        except ValueError as error:
            raise RuntimeFailure(f"{url} is no address of a Redis: {error}; write redis://HOST:PORT/DB") from None
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
        self._client.close()

    def _do(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._client)
        except self._lost as error:
            self._client.connection_pool.disconnect()
            raise StoreLost(f"the Redis at {without_password(self._url)} cannot be used: {error}") from None
