"""A store through which ranks exchange messages beside the training: queues in rank 0's process, or Redis.

    rank 3 --push("to-0", report)--> | to-0 | --pop("to-0")--> rank 0

A store is a set of named queues of bytes that every rank can reach. It may be unreachable for a while. Training never
waits for it, and what is lost with a store stays lost. `StoreClient` tries again, and knows for how long the store
has not answered. `meet` agrees on the store of a run, on the names of its queues, and on whose clock counts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import addresses_for, clock_name, listen, network_name
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.probe import ahead_of_first

T = TypeVar("T")


class StoreLost(RuntimeFailure):
    """The store does not answer, now; the next call tries to reach it again."""


class Store(Protocol):
    """One connection, for one thread. Every call raises StoreLost where the store cannot be reached.

    A store that stands still without closing its connections holds a call for some seconds longer than asked, and
    then counts as one that cannot be reached.
    """

    def push(self, queue: str, value: bytes) -> None:
        """Adds a value to the end of a queue."""

    def pop(self, queue: str, timeout: float) -> bytes | None:
        """Takes the first value of a queue; None where none comes within `timeout` seconds."""

    def another(self) -> Store:
        """A connection for another thread."""

    def close(self) -> None:
        """Ends the connection; any thread may do that. A call under way, and all after it, raise StoreLost."""


def without_password(address: str) -> str:
    """The address without the name and the password in it, whatever else is wrong with it."""
    scheme, mark, rest = address.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else address.rpartition("@")[2]


class InProcessStore:
    """A store that is this process's memory; it is never gone."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[bytes]] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()

    def push(self, queue: str, value: bytes) -> None:
        self._queue(queue).put(value)

    def pop(self, queue: str, timeout: float) -> bytes | None:
        try:
            return self._queue(queue).get(timeout=timeout)
        except Empty:
            return None

    def another(self) -> InProcessStore:
        return self

    def close(self) -> None:
        pass

    def _queue(self, name: str) -> SimpleQueue[bytes]:
        with self._lock:
            return self._queues[name]


ANSWER_S = 5.0
"""Seconds for reaching a server, and for its answer besides what a pop waits for itself."""
_HEADER = struct.Struct("!dII")
"""Of a request and of an answer: seconds, and how many bytes follow of the queue's name and of the value."""
_PUSHES = -1.0
"""In place of a pop's seconds: the request is a push. In an answer: there is no value."""


class QueueServer:
    """A store that lives in this process and is reached by TCP. Each connection has a thread.

    Args:
        addresses: of this host, on which it listens. One that cannot be used is left out, but for the first.
        port: any free one for 0.

    Raises:
        OSError: the first address or the port cannot be used.
    """

    def __init__(self, addresses: Sequence[str], port: int = 0) -> None:
        self._queues = InProcessStore()
        self._open = [listen(port, addresses[0])]
        self.port = self._open[0].getsockname()[1]
        for address in addresses[1:]:
            with contextlib.suppress(OSError):
                self._open.append(listen(self.port, address))
        for listener in list(self._open):
            self._start(self._accept, listener)

    def close(self) -> None:
        """Ends it and all its connections."""
        while self._open:
            _cut(self._open.pop())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            self._open.append(connection)
            self._start(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        while True:
            seconds, queue, value = _receive(connection)
            if seconds == _PUSHES:
                self._queues.push(queue, value)
                _send(connection, _PUSHES)
            else:
                found = self._queues.pop(queue, seconds)
                _send(connection, _PUSHES if found is None else 0.0, value=found or b"")

    def _start(self, work: Callable[[socket.socket], None], one: socket.socket) -> None:
        def run() -> None:
            with one, contextlib.suppress(OSError):  # the other end is gone, or this was closed
                work(one)

        threading.Thread(target=run, name="penstock-store", daemon=True).start()


class TcpStore:
    """A client of the `QueueServer` at `host:port`.

    Args:
        others: further addresses of the same server, by other networks. Each is tried if the one before is not
            reached (any more).

    Raises:
        StoreLost: nobody listens there, or nobody answers.
    """

    def __init__(self, host: str, port: int, others: Sequence[str] = ()) -> None:
        self._hosts, self._port = [host, *others], port
        self._closed = False
        self._connection: socket.socket | None = None
        self.pop("", 0.0)  # the kernel takes connections for a server that stands still

    def push(self, queue: str, value: bytes) -> None:
        self._ask(_PUSHES, queue, value)

    def pop(self, queue: str, timeout: float) -> bytes | None:
        return self._ask(max(timeout, 0.0), queue)

    def another(self) -> TcpStore:
        return TcpStore(self._hosts[0], self._port, self._hosts[1:])

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _ask(self, seconds: float, queue: str, value: bytes = b"") -> bytes | None:
        """Sends a request; returns the value that the answer has."""
        try:
            connection = self._connection = self._connection or self._connect()
            connection.settimeout(ANSWER_S + seconds)
            _send(connection, seconds, queue, value)
            found, _, answer = _receive(connection)
        except OSError as error:
            self._drop()
            raise self._lost(error) from None
        return None if found == _PUSHES else answer

    def _connect(self) -> socket.socket:
        """Raises OSError where no address is reached."""
        if self._closed:
            raise ConnectionError("it was closed here")
        for host in list(self._hosts):
            try:
                return socket.create_connection((host, self._port), ANSWER_S)
            except OSError as failed:
                error = failed
                self._hosts.append(self._hosts.pop(0))
        raise error

    def _drop(self) -> None:
        """Ends the connection, and with it a call that waits for it in another thread."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _cut(connection)

    def _lost(self, error: OSError) -> StoreLost:
        return StoreLost(f"the store at {' or '.join(self._hosts)}:{self._port} cannot be reached: {error}")


def _send(connection: socket.socket, seconds: float, queue: str = "", value: bytes = b"") -> None:
    name = queue.encode()
    connection.sendall(_HEADER.pack(seconds, len(name), len(value)) + name + value)


def _receive(connection: socket.socket) -> tuple[float, str, bytes]:
    seconds, length, size = _HEADER.unpack(_read(connection, _HEADER.size))
    return seconds, _read(connection, length).decode(errors="replace"), _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ConnectionError if the other end closes before."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 16))
        if not part:
            raise ConnectionError("it has closed the connection")
        found += part
    return bytes(found)


def _cut(one: socket.socket) -> None:
    """Ends a connection, for all that wait for it."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


EXPIRY_S = 3600
"""Seconds after which a queue that nobody has touched is forgotten, so that a job that dies leaves nothing behind."""
PASSWORD = "PENSTOCK_STORE_PASSWORD"
"""The environment variable with the password, where the address has none."""


class RedisStore:
    """A client of the Redis at `url`.

    Redis as a store: `redis://[user:password@]host:port[/db]`. It needs the extra `redis`.

    A command line is for every user of the machine to read; a password in PENSTOCK_STORE_PASSWORD is not.

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
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
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
            pipe.expire(queue, EXPIRY_S)
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


_TCP = re.compile(r"tcp://(?P<host>(?:\[[^\]]+\]|[^:/])+):(?P<port>[0-9]{1,5})")


def open_store(address: str) -> Store:
    """Connects to `tcp://HOST:PORT` (a `QueueServer`; `tcp://HOST,HOST:PORT` where it has several addresses) or
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


PAUSE = 0.25
"""Seconds between two tries while the store is gone."""


class StoreClient:
    """A connection that does not raise.

    Each line belongs to one thread. Any other may ask how long it has been silent, and close it, even while a call
    stands still because the store's process does.

    Attributes:
        error: what went wrong last, in words.
    """

    def __init__(self, store: Store) -> None:
        self.error = "it does not answer"
        self._store = store
        self._since: float | None = None

    def push(self, queue: str, value: bytes) -> bool:
        """Pushes; returns whether the store took it."""

        def push() -> bool:
            self._store.push(queue, value)
            return True

        return self._tried(push) is not None

    def pop(self, queue: str, timeout: float) -> bytes | None:
        """Pops; None where nothing came within `timeout` seconds, or the store is gone."""
        return self._tried(lambda: self._store.pop(queue, timeout))

    def silent(self) -> float:
        """Seconds since the store last answered, where a call waits for it or failed."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        self._store.close()

    def _tried(self, call: Callable[[], T]) -> T | None:
        """What a call returns; None where the store is gone."""
        if self._since is None:
            self._since = time.monotonic()
        try:
            found = call()
        except StoreLost as error:
            self.error = str(error)
            time.sleep(PAUSE)
            return None
        self._since = None
        return found


@dataclass
class Rendezvous:
    """What a process needs to reach the others.

    Attributes:
        store: connected. name: tells this run's queues from those of all others.
        first: the first rank of this process; processes: of each.
        clock_offsets_ns: nanoseconds that each rank's clock is ahead of rank 0's.
        compare: measures that again, where there are several clocks; every process must call it.
        server: the store itself, if it lives here.
    """

    store: Store
    name: str
    first: int
    processes: Sequence[int]
    clock_offsets_ns: Sequence[int] = ()
    compare: Callable[[], Sequence[int]] | None = field(default=None, repr=False)
    server: QueueServer | None = field(default=None, repr=False)

    @property
    def reports(self) -> str:
        """The queue of all reports."""
        return f"{self.name}/reports"

    def plans(self, first: int) -> str:
        """The queue of the plans for a process."""
        return f"{self.name}/plans/{first}"

    def part(self, seconds: float) -> None:
        """Tells rank 0 that this process leaves the store alone. Rank 0 waits for that: the store may end with it."""
        try:
            if self.first != self.processes[0]:
                self.store.push(f"{self.name}/gone", b"")
                return
            end, left = time.monotonic() + seconds, len(self.processes) - 1
            while left and (rest := end - time.monotonic()) > 0:
                left -= self.store.pop(f"{self.name}/gone", rest) is not None
        except StoreLost:
            pass

    def close(self) -> None:
        self.store.close()
        if self.server is not None:
            self.server.close()


def meet(address: str | None, peers: Peers) -> Rendezvous:
    """Agrees on a store, and reaches it. Every process must call it.

    Without an address: queues that rank 0's process serves, on the addresses by which the others reach it; memory
    where all ranks are in this process.

    Raises:
        RuntimeFailure: some rank cannot use the store; on all ranks alike.
    """
    name, first = f"penstock-{uuid.uuid4().hex[:12]}", peers.here[0]
    if not isinstance(peers, GroupPeers):
        store = InProcessStore() if address is None else open_store(address)
        return Rendezvous(store, name, first, (first,), (0,) * peers.num_ranks)
    gathered = peers.gather((clock_name(), network_name()))
    clocks = [str(clock) for clock, _ in gathered]
    server: QueueServer | None = None
    error = ""
    if address is None and first == 0:
        try:
            addresses = _own_addresses([str(network) for _, network in gathered])
            server = QueueServer(addresses)
            address = f"tcp://{','.join(f'[{each}]' if ':' in each else each for each in addresses)}:{server.port}"
        except (RuntimeFailure, OSError) as failure:
            error = f"the store for adapting cannot be served: {failure}"
    name, address, failed = peers.gather((name, address, error))[0]
    if failed:
        raise RuntimeFailure(failed)
    reached = None
    try:
        reached = open_store(str(address))
    except RuntimeFailure as failure:
        error = str(failure)
    refused = [f"rank {rank}: {text}" for rank, text in enumerate(peers.gather(error)) if text]
    if refused or reached is None:
        raise RuntimeFailure(f"{refused[0]}; adapting needs a store that every rank reaches")

    def compare() -> list[int]:
        return [int(each) for each in peers.gather(ahead_of_first(peers, clocks))]

    again = compare if len(set(clocks)) > 1 else None
    return Rendezvous(reached, name, first, range(peers.num_ranks), compare(), again, server)


def _own_addresses(networks: Sequence[str]) -> Sequence[str]:
    """The addresses by which the others reach this host. Raises RuntimeFailure if it knows only loopback for itself.

    Args:
        networks: every process's `network_name`.
    """
    found = addresses_for(networks)
    if len(set(networks)) == 1 or not ipaddress.ip_address(found[0]).is_loopback:
        return found
    with contextlib.suppress(OSError):  # nothing says which interface: the one that its own name stands for
        found = (socket.gethostbyname(socket.gethostname()),)
    if ipaddress.ip_address(found[0]).is_loopback:
        raise RuntimeFailure(
            "every rank must reach it, and this host knows only loopback for itself: name an interface in "
            "PENSTOCK_INTERFACES, or give a store"
        )
    return found
