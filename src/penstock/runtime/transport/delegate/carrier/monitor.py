"""What the kernel says of our interfaces (rtnetlink): which addresses can be used, and each change of that.

A dead interface is known here within milliseconds, where a connection over it would wait for its deadline.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_GROUPS = 0x1 | 0x10 | 0x100  # links, IPv4 addresses, IPv6 addresses
_NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _DELADDR, _GETADDR = 16, 17, 18, 20, 21, 22
_DONE, _REQUEST_DUMP = 3, 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UP, _RUNNING = 0x1, 0x40
_MESSAGE, _LINK, _ADDRESS, _ATTRIBUTE = (struct.Struct(f) for f in ("=IHHII", "=BxHiII", "=BBBBI", "=HH"))


class LinkState(NamedTuple):
    """An interface is up (and its carrier there), or not."""

    number: int
    up: bool


class AddressState(NamedTuple):
    """An address is on an interface, or no longer."""

    number: int
    address: str
    there: bool


def read(data: bytes) -> Iterator[LinkState | AddressState]:
    """What a datagram of the kernel's says, as far as it concerns us."""
    for what, body, end in _messages(data):
        if what in (_NEWLINK, _DELLINK):
            _, _, index, flags, _ = _LINK.unpack_from(data, body)
            yield LinkState(index, what == _NEWLINK and flags & (_UP | _RUNNING) == _UP | _RUNNING)
        elif what in (_NEWADDR, _DELADDR):
            family, _, _, _, index = _ADDRESS.unpack_from(data, body)
            found = dict(_attributes(data, body + _ADDRESS.size, end))
            raw = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
            if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
                yield AddressState(index, socket.inet_ntop(family, raw), what == _NEWADDR)


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Of each message in a datagram its kind, and where its body begins and ends."""
    at = 0
    while at + _MESSAGE.size <= len(data):
        length, what, *_ = _MESSAGE.unpack_from(data, at)
        if length < _MESSAGE.size:
            return
        yield what, at + _MESSAGE.size, at + length
        at += -(-length // 4) * 4


def _attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, bytes]]:
    while at + _ATTRIBUTE.size <= end:
        length, what = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield what, data[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4


class InterfaceStates:
    """Which of our addresses can be used, as far as the kernel told. An address it never named counts as usable."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self.up = [True] * len(addresses)
        self._index: dict[str, int] = {}
        self._gone: set[str] = set()
        self._links: dict[int, bool] = {}

    def learn(self, state: LinkState | AddressState) -> list[tuple[int, bool]]:
        """Takes a word in; returns (place of our address, whether it can be used) for each that changed."""
        if isinstance(state, LinkState):
            self._links[state.number] = state.up
        elif state.there:
            self._index[state.address] = state.number
            self._gone.discard(state.address)
        else:
            self._gone.add(state.address)
        changed = []
        for place, address in enumerate(self.addresses):
            index = self._index.get(address)
            up = address not in self._gone and (index is None or self._links.get(index, True))
            if up != self.up[place]:
                self.up[place] = up
                changed.append((place, up))
        return changed


class InterfaceMonitor:
    """A netlink socket. Where the kernel permits none, `socket` is None and deadlines alone tell."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.interfaces = InterfaceStates(addresses)
        self.socket: socket.socket | None = None
        try:
            made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        except OSError:
            return
        try:
            made.bind((0, _GROUPS))
            made.settimeout(1.0)
            for request in (_GETADDR, _GETLINK):
                made.send(_MESSAGE.pack(_MESSAGE.size + 16, request, _REQUEST_DUMP, request, 0) + bytes(16))
                while not self._dumped(made.recv(1 << 16)):
                    pass
            made.setblocking(False)
        except OSError:
            made.close()
            return
        self.socket = made

    def _dumped(self, data: bytes) -> bool:
        for state in read(data):
            self.interfaces.learn(state)
        return any(what == _DONE for what, *_ in _messages(data))

    def changes(self) -> list[tuple[int, bool]]:
        """What changed since the last call."""
        found: list[tuple[int, bool]] = []
        while self.socket is not None:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:  # more news than the socket holds: what is true now comes with the next
                continue
            for state in read(data):
                found += self.interfaces.learn(state)
        return found
