"""A store by its name."""

from __future__ import annotations

import re

from penstock.runtime.adapt.store.redis_store import RedisStore
from penstock.runtime.adapt.store.store import Store, without_password
from penstock.runtime.adapt.store.tcp import TcpStore
from penstock.runtime.errors import RuntimeFailure

_TCP = re.compile(r"tcp://(?P<host>(?:\[[^\]]+\]|[^:/])+):(?P<port>[0-9]{1,5})")


def open_store(address: str) -> Store:
    """Connects to `tcp://HOST:PORT` (a TCPStore; `tcp://HOST,HOST:PORT` where it has several addresses) or
    `redis://HOST:PORT/DB`.

    Raises:
        RuntimeFailure: an address of neither kind, or redis-py is not there.
        StoreLost: it cannot be reached, or refuses.
    """
    if address.startswith(("redis://", "rediss://")):
        return RedisStore(address)
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise RuntimeFailure(
            f"store {without_password(address)!r}: write tcp://HOST:PORT or redis://HOST:PORT/DB, or leave it out"
        )
    host, *others = (each.strip("[]") for each in match["host"].split(","))
    return TcpStore(host, int(match["port"]), others)
