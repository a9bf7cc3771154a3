"""Where the processes of a run meet beside the training: which store, under which names, and by whose clock."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.runtime.adapt.store import InProcessStore, Store, StoreLost, TcpStore, open_store
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.clock import ahead_of_first, clock_name
from penstock.runtime.mesh.interfaces import addresses_for, listen, local_addresses, named, network_name
from penstock.runtime.mesh.peers import GroupPeers, Peers


@dataclass
class Rendezvous:
    """What a process needs to reach the others.

    Attributes:
        store: connected. name: tells this run's queues from those of all others.
        first: the first rank of this process; processes: of each.
        ahead: nanoseconds that each rank's clock is ahead of rank 0's.
        compare: measures that again, where there are several clocks; every process must call it.
        server: a TCPStore that lives here, if it does.
    """

    store: Store
    name: str
    first: int
    processes: Sequence[int]
    ahead: Sequence[int] = ()
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
    told = peers.gather((clock_name(), network_name()))
    clocks = [str(clock) for clock, _ in told]
    server, error = None, ""
    if address is None and first == 0:
        try:
            server, address = _jobs_own([str(network) for _, network in told])
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
