"""By which addresses of its own a host is to be reached: what delegates and stores listen on and send from.

Nothing of ours listens on more than it needs: on loopback where all processes share one network, else on the one
address that peers use.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.runtime.errors import RuntimeFailure

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface (Linux)."""
LOOPBACK = "127.0.0.1"
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
VARIABLES = ("PENSTOCK_INTERFACES", "GLOO_SOCKET_IFNAME")
"""Environment variables that name interfaces, apart by commas, the preferred one first."""
BACKLOG = 2048
"""Connections that may wait to be accepted: all ranks of a large job call at once."""


def local_addresses(given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Addresses of this host, the preferred one first.

    Those given, as addresses or interfaces' names; else those in PENSTOCK_INTERFACES, or in GLOO_SOCKET_IFNAME; else
    the address from which MASTER_ADDR is reached; else loopback.

    Raises:
        RuntimeFailure: an interface that is not there, or has no IPv4 address.
    """
    if names := named(given):
        return tuple(dict.fromkeys(_address_of(name) for name in names))
    return (_address_towards(os.environ.get("MASTER_ADDR", "")),)


def clock_name() -> str:
    """The same for all processes that share a monotonic clock: those of one machine, whatever its namespaces."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def network_name() -> str:
    """The same for processes that reach each other over loopback: those of one machine and one network namespace."""
    try:
        return f"{clock_name()}/{_NETWORK.stat().st_ino}"
    except OSError:
        return socket.gethostname()


def addresses_for(networks: Sequence[str], given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Addresses of this host by which its peers reach it, the preferred one first.

    Args:
        networks: every process's `network_name`. Where all are the same, and no interface is named, loopback does.
        given: see `local_addresses`.

    Raises:
        RuntimeFailure: as `local_addresses`.
    """
    if len(set(networks)) == 1 and not named(given):
        return (LOOPBACK,)
    return local_addresses(given)


def listen(port: int, address: str) -> socket.socket:
    """A socket that listens on one address of this host, on any free port for 0.

    Raises:
        OSError: the port is taken, or the address is not of this host.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def named(given: Sequence[str] | None = None) -> list[str]:
    """The interfaces that are named, by an argument or by the environment."""
    named = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    return list(given) if given else [name for name in named.split(",") if name]


def _address_of(name: str) -> str:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            raise RuntimeFailure(
                f"interface {name!r} is every address of this host, of which peers need one: name an interface or "
                "one address"
            )
        return str(address)
    have = [each for _, each in socket.if_nameindex()]
    if name in have:  # of a longer name the kernel would find the interface that has its first 15 bytes
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()))
            return socket.inet_ntoa(answer[20:24])
    raise RuntimeFailure(
        f"interface {name!r} has no address here; this host has {', '.join(have)}: name one of those, or an address"
    )


def _address_towards(host: str) -> str:
    """The address that a packet to `host` leaves from; nothing is sent."""
    if not host:
        return LOOPBACK
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((host, 9))
            return str(asked.getsockname()[0])
    except OSError:
        return LOOPBACK
