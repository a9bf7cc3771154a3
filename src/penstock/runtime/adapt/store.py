"""A store through which ranks exchange messages beside the training: queues in this process, a TCPStore, or Redis.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import addresses_for, clock_name, listen, local_addresses, named, network_name
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.probe import ahead_of_first


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


POLL_S = 0.02
"""Seconds between two looks at a queue. One takes about 40 us."""
FIRST_ANSWER_S = 20.0
"""Seconds that a TCPStore may take to answer its client at first: a machine is busiest when ranks start."""
CONNECT_S = 5.0
"""Seconds for reaching a server, and for any other of its answers besides what a call waits for itself."""
TORCH_MARGIN_S = 0.25
"""Seconds that torch may take to give up by itself."""
_DESCRIPTORS = Path("/proc/self/fd")
_NETWORKS = (socket.AF_INET, socket.AF_INET6)
"""Families of sockets whose other end is a host and a port; one between processes of this host has a name or none."""


class TcpStore:
    """A client of the TCPStore at `host:port`.

    A queue is asked every few milliseconds, and not waited for: torch writes two lines to stderr for every wait that
    ends without a value. Before a client is made, a plain socket finds out whether anybody listens, for the same
    reason.

    torch's client waits for an answer forever where the server's process stands still. So the kernel is told to end
    any wait of its socket, which is found among those of this process.

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
        self._client: dist.TCPStore | None = self._connect(FIRST_ANSWER_S)

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
            time.sleep(min(POLL_S, left))

    def another(self) -> TcpStore:
        return TcpStore(self._hosts[0], self._port, self._hosts[1:])

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _do(self, call: Callable[[dist.TCPStore], Any]) -> Any:
        client = self._client
        if client is None:
            client = self._client = self._connect(CONNECT_S)
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

    def _connect(self, limit: float) -> dist.TCPStore:
        if self._closed:
            raise StoreLost(f"{self._where} was closed here")
        for _ in self._hosts:
            try:
                socket.create_connection((self._hosts[0], self._port), timeout=CONNECT_S).close()
                break
            except OSError as failed:
                error = failed
                self._hosts.append(self._hosts.pop(0))
        else:
            raise StoreLost(f"{self._where} cannot be reached: {_first_line(error)}")
        if not _connecting.acquire(timeout=2 * limit):
            raise StoreLost(f"{self._where} cannot be reached: it does not answer")
        try:
            before = _sockets_to(self._port)
            client = self._make(before, limit)
            self._sockets = _since(before, self._port)
            for one in self._sockets:
                for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    one.setsockopt(socket.SOL_SOCKET, direction, _timeval(CONNECT_S))
        finally:
            _connecting.release()
        if self._closed:  # meanwhile
            self._drop()
        return client

    def _make(self, before: Iterable[str], limit: float) -> dist.TCPStore:
        """A client. A server that stands still takes the connection and never answers, which torch waits for."""
        made: list[dist.TCPStore] = []
        errors: list[Exception] = []

        def make() -> None:
            within = timedelta(seconds=limit)
            try:
                made.append(dist.TCPStore(self._hosts[0], self._port, None, False, within, wait_for_workers=False))
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=make, name="penstock-store", daemon=True)
        thread.start()
        thread.join(limit + TORCH_MARGIN_S)
        while thread.is_alive() and (found := _since(before, self._port)):
            for one in found:
                _cut(one)
            thread.join(TORCH_MARGIN_S)
        if not made:
            why = _first_line(errors[0]) if errors else f"it has not answered for {limit:g} s"
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
                socket_timeout=CONNECT_S,
                socket_connect_timeout=CONNECT_S,
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
        self._begin()
        try:
            self._store.push(queue, value)
        except StoreLost as error:
            self._fail(error)
            return False
        self._since = None
        return True

    def pop(self, queue: str, timeout: float) -> bytes | None:
        """Pops; None where nothing came within `timeout` seconds, or the store is gone."""
        self._begin()
        try:
            found = self._store.pop(queue, timeout)
        except StoreLost as error:
            self._fail(error)
            return None
        self._since = None
        return found

    def silent(self) -> float:
        """Seconds since the store last answered, where a call waits for it or failed."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        self._store.close()

    def _begin(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def _fail(self, error: StoreLost) -> None:
        self.error = str(error)
        time.sleep(PAUSE)


@dataclass
class Rendezvous:
    """What a process needs to reach the others.

    Attributes:
        store: connected. name: tells this run's queues from those of all others.
        first: the first rank of this process; processes: of each.
        clock_offsets_ns: nanoseconds that each rank's clock is ahead of rank 0's.
        compare: measures that again, where there are several clocks; every process must call it.
        server: a TCPStore that lives here, if it does.
    """

    store: Store
    name: str
    first: int
    processes: Sequence[int]
    clock_offsets_ns: Sequence[int] = ()
    compare: Callable[[], Sequence[int]] | None = field(default=None, repr=False)
    server: Any = field(default=None, repr=False)

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
        self.server = None


def meet(address: str | None, peers: Peers) -> Rendezvous:
    """Agrees on a store, and reaches it. Every process must call it.

    Without an address: the TCPStore that torch.distributed was set up with, where MASTER_ADDR and MASTER_PORT say
    where it listens, else one that rank 0 starts, on the one address by which the others reach it; memory where all
    ranks are in this process.

    Raises:
        RuntimeFailure: some rank cannot use the store; on all ranks alike.
    """
    name, first = f"penstock-{uuid.uuid4().hex[:12]}", peers.here[0]
    if not isinstance(peers, GroupPeers):
        store = InProcessStore() if address is None else open_store(address)
        return Rendezvous(store, name, first, (first,), (0,) * peers.num_ranks)
    gathered = peers.gather((clock_name(), network_name()))
    clocks = [str(clock) for clock, _ in gathered]
    server, error = None, ""
    if address is None and first == 0:
        try:
            server, address = _jobs_own([str(network) for _, network in gathered])
        except RuntimeFailure as failure:
            error = str(failure)
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


def _jobs_own(networks: Sequence[str]) -> tuple[Any, str]:
    """The address of the job's TCPStore; or one started here, which must then be kept.

    Args:
        networks: every process's `network_name`.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if host and port.isdecimal():
        try:
            TcpStore(host, int(port)).close()
            return None, f"tcp://{','.join([host, *_also_at(host, int(port))])}:{port}"
        except StoreLost:
            pass
    address = _own_address(networks)
    try:
        listener = listen(0, address)
    except OSError as error:
        raise RuntimeFailure(f"a store for adapting cannot listen on {address}: {error.strerror}") from None
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # by itself it would listen on all addresses of the host
    )
    return server, f"tcp://{f'[{address}]' if ':' in address else address}:{port}"


def _also_at(host: str, port: int) -> list[str]:
    """Other addresses of this host by which the store at `host:port` is reached too, if it is here."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        known = socket.gethostbyname(host)
        here = local_addresses() if named() else ()
        for address in here if known in here else ():
            with contextlib.suppress(StoreLost):
                if address != known:
                    TcpStore(address, port).close()
                    found.append(address)
    return found


def _own_address(networks: Sequence[str]) -> str:
    """The one address by which the others reach this host."""
    address = addresses_for(networks)[0]
    if len(set(networks)) == 1 or not ipaddress.ip_address(address).is_loopback:
        return address
    with contextlib.suppress(OSError):  # nothing says which interface: the one that its own name stands for
        address = socket.gethostbyname(socket.gethostname())
    if ipaddress.ip_address(address).is_loopback:
        raise RuntimeFailure(
            "adapting needs a store that every rank reaches, and this host knows only loopback for itself: name an "
            "interface in PENSTOCK_INTERFACES, or give a store"
        )
    return address
