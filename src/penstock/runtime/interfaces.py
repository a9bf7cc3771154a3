"""By which addresses of its own a host is to be reached: what delegates listen on and send from."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

from penstock.runtime.errors import RuntimeFailure

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface (Linux)."""
LOOPBACK = "127.0.0.1"
VARIABLES = ("PENSTOCK_INTERFACES", "GLOO_SOCKET_IFNAME")
"""Environment variables that name interfaces, apart by commas, the preferred one first."""


def local_addresses(given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Addresses of this host, the preferred one first.

    Those given, as addresses or interfaces' names; else those in PENSTOCK_INTERFACES, or in GLOO_SOCKET_IFNAME; else
    the address from which MASTER_ADDR is reached; else loopback.

    Raises:
        RuntimeFailure: an interface that is not there, or has no IPv4 address.
    """
    told = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    names = list(given) if given else [name for name in told.split(",") if name]
    if names:
        return tuple(dict.fromkeys(_address_of(name) for name in names))
    return (_address_towards(os.environ.get("MASTER_ADDR", "")),)


def _address_of(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
    except OSError as error:
        have = ", ".join(each for _, each in socket.if_nameindex())
        raise RuntimeFailure(
            f"interface {name!r} has no address here ({error.strerror}); this host has {have}: name one of those, or "
            f"give an address"
        ) from None
    return socket.inet_ntoa(answer[20:24])


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
