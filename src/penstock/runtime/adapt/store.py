"""A store through which ranks exchange messages beside the training: torch's own, in rank 0's process, or Redis.

    rank 3 --push("reports", report)--> | reports | --pop("reports")--> rank 0

A store is a set of named queues of bytes that every rank can reach. It may be unreachable for a while. Training never
waits for it, and what is lost with a store stays lost. `meet` agrees on the store of a run, on the names of its
queues, and on whose clock counts. Calls of its `Rendezvous` do not raise, and it knows for how long the store has not
answered.
"""

from __future__ import annotations

import ipaddress
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import addresses_for, clock_name, listen, network_name
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.probe import ahead_of_first

T = TypeVar("T")

ANSWER_S = 5.0
"""Seconds for reaching a store, and for an answer of Redis."""
PAUSE_S = 0.25
"""Seconds between two tries while the store is gone."""
LOOK_S = 0.02
"""Seconds between two looks at an empty queue."""


class StoreLost(RuntimeFailure):
    """The store does not answer, now; the next call tries to reach it again."""


class Store(Protocol):
    """A connection, for all threads of a process. Every call raises StoreLost where the store cannot be reached."""

    def push(self, queue: str, value: bytes) -> None:
        """Adds a value to the end of a queue."""

    def pop(self, queue: str) -> bytes | None:
        """Takes the first value of a queue; None where there is none."""

    def close(self) -> None:
        """Ends the connection."""


class TorchStore:
    """Queues of a torch store: a TCPStore, whose server may live in this process, or a HashStore for one process."""

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store | None = store

    def push(self, queue: str, value: bytes) -> None:
        self._do(lambda store: store.queue_push(queue, value))

    def pop(self, queue: str) -> bytes | None:
        try:
            return self._do(lambda store: store.queue_pop(queue, block=False))
        except dist.QueueEmptyError:
            return None

    def close(self) -> None:
        self._store = None

    def _do(self, call: Callable[[Any], T]) -> T:
        if (store := self._store) is None:
            raise StoreLost("the job's own store was closed here")
        try:
            return call(store)
        except dist.QueueEmptyError:
            raise
        except RuntimeError as error:
            raise StoreLost(f"the job's own store cannot be reached: {str(error).splitlines()[0]}") from None


EXPIRY_S = 3600
"""Seconds after which a queue that nobody has touched is forgotten, so that a job that dies leaves nothing behind."""
PASSWORD = "PENSTOCK_STORE_PASSWORD"
"""The environment variable with the password, where the address has none."""


class RedisStore:
    """A client of the Redis at `redis://[user:password@]host:port[/db]`. It needs the extra `redis`.

    A command line is for every user of the machine to read; a password in PENSTOCK_STORE_PASSWORD is not.

    Raises:
        RuntimeFailure: the address is none. ModuleNotFoundError: redis-py is not installed.
        StoreLost: it cannot be reached, or refuses (it wants a password, say).
    """

    def __init__(self, url: str) -> None:
        import redis

        self._shown = without_password(url)
        self._lost = (redis.RedisError, OSError)
        try:
            self._client: Any = redis.Redis.from_url(  # what the address says goes before these
                url,
                password=os.environ.get(PASSWORD),
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                retry=None,
                protocol=2,
            )
        except ValueError:  # whose words may quote a piece of the password
            raise RuntimeFailure(
                f"{self._shown} is no address of a Redis; write redis://HOST:PORT/DB, and : / # ? @ % in a password "
                "percent-encoded"
            ) from None
        self._do(lambda client: client.ping())

    def push(self, queue: str, value: bytes) -> None:
        self._do(lambda client: client.rpush(queue, value))
        self._do(lambda client: client.expire(queue, EXPIRY_S))

    def pop(self, queue: str) -> bytes | None:
        found: bytes | None = self._do(lambda client: client.lpop(queue))
        return found

    def close(self) -> None:
        self._client.close()

    def _do(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._client)
        except self._lost as error:
            raise StoreLost(f"the Redis at {self._shown} cannot be used: {error}") from None


def without_password(address: str) -> str:
    """The address without the name and the password in it, whatever else is wrong with it."""
    scheme, mark, rest = address.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else address.rpartition("@")[2]


@dataclass
class Rendezvous:
    """What a process needs to reach the others. Its calls do not raise, and all threads of the process share it.

    Attributes:
        store: connected. name: tells this run's queues from those of all others.
        first: the first rank of this process; processes: of each.
        clock_offsets_ns: nanoseconds that each rank's clock is ahead of rank 0's.
        compare: measures these offsets again; None with one clock. Every process must call it, with all peers.
        error: what went wrong last, in words.
    """

    store: Store
    name: str
    first: int
    processes: Sequence[int]
    clock_offsets_ns: Sequence[int] = ()
    compare: Callable[[Any], Sequence[int]] | None = field(default=None, repr=False)
    error: str = "it does not answer"
    _since: float | None = field(default=None, repr=False)

    @property
    def reports(self) -> str:
        """The queue of all reports."""
        return f"{self.name}/reports"

    def plans(self, first: int) -> str:
        """The queue of the plans for a process."""
        return f"{self.name}/plans/{first}"

    def push(self, queue: str, value: bytes) -> bool:
        """Pushes; returns whether the store took it."""

        def push() -> bool:
            self.store.push(queue, value)
            return True

        return self._tried(push) is not None

    def pop(self, queue: str, timeout: float) -> bytes | None:
        """Pops; None where nothing came within `timeout` seconds, or the store is gone."""
        end = time.monotonic() + timeout
        while (found := self._tried(lambda: self.store.pop(queue))) is None and time.monotonic() < end:
            time.sleep(LOOK_S)
        return found

    def silent(self) -> float:
        """Seconds since the store last answered, where a call waits for it or failed."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def part(self, seconds: float) -> None:
        """Tells rank 0 that this process leaves the store alone. Rank 0 waits for that: the store may end with it."""
        if self.first != self.processes[0]:
            self.push(f"{self.name}/gone", b"")
            return
        end, left = time.monotonic() + seconds, len(self.processes) - 1
        while left and (rest := end - time.monotonic()) > 0:
            left -= self.pop(f"{self.name}/gone", rest) is not None

    def close(self) -> None:
        self.store.close()

    def _tried(self, call: Callable[[], T]) -> T | None:
        """What a call returns; None where the store is gone."""
        if self._since is None:
            self._since = time.monotonic()
        try:
            found = call()
        except StoreLost as error:
            self.error = str(error)
            time.sleep(PAUSE_S)
            return None
        self._since = None
        return found


def meet(address: str | None, peers: Peers) -> Rendezvous:
    """Agrees on a store, and reaches it. Every process must call it.

    Without an address that is a store of torch: a TCPStore that rank 0's process serves, on the address by which the
    others reach it; memory where all ranks are in this process.

    Raises:
        RuntimeFailure: some rank cannot use the store; on all ranks alike.
    """
    name, first = f"penstock-{uuid.uuid4().hex[:12]}", peers.here[0]
    if not isinstance(peers, GroupPeers):
        store = TorchStore(dist.HashStore()) if address is None else RedisStore(address)
        return Rendezvous(store, name, first, (first,), (0,) * peers.num_ranks)
    clocks, networks = zip(*peers.gather((clock_name(), network_name())), strict=True)
    reached: list[Store] = []

    def serve() -> tuple[str, str, int]:
        if address is not None or first != 0:
            return name, "", 0
        host = addresses_for(networks)[0]
        if len(set(networks)) > 1 and ipaddress.ip_address(host).is_loopback:
            raise RuntimeFailure(
                "every rank must reach the store, and this host knows only loopback for itself: name an interface in "
                "PENSTOCK_INTERFACES, or give a store"
            )
        with listen(0, host) as listener:
            port = listener.getsockname()[1]
            reached.append(_tcp(host, port, master_listen_fd=listener.detach()))
        return name, host, port

    name, host, port = peers.together(serve, "serve the store for adapting")[0]

    def reach() -> None:
        if not reached:
            reached.append(RedisStore(address) if address is not None else _tcp(host, port))

    peers.together(reach, "reach the store, which adapting needs")
    compare = partial(ahead_of_first, names=clocks)
    again = compare if len(set(clocks)) > 1 else None
    return Rendezvous(reached[0], name, first, range(peers.num_ranks), compare(peers), again)


def _tcp(host: str, port: int, master_listen_fd: int | None = None) -> TorchStore:
    """A client of the TCPStore at an address. Its server is here too if there is a descriptor to listen on."""
    is_here, timeout = master_listen_fd is not None, timedelta(seconds=ANSWER_S)
    return TorchStore(
        dist.TCPStore(
            host, port, is_master=is_here, timeout=timeout, wait_for_workers=False, master_listen_fd=master_listen_fd
        )
    )
