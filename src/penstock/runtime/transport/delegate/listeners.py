"""Where a rank's receiving delegates can be reached: sockets held by the rank, so that they outlive one."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.delegate.carrier.sockets import family_of
from penstock.runtime.transport.delegate.process import cannot

BACKLOG = 128
KINDS = 2
PRESENCE = (KINDS, 0)
"""Where, in place of a kind and place, the sockets are that show that the process is there."""


class Listeners:
    """For each kind and place one socket an interface; and one that only shows that the process is there.

    Raises:
        RuntimeFailure: an address that is not of this host, too few descriptors.
    """

    def __init__(self, interfaces: Sequence[str], num_places: int) -> None:
        self.interfaces = tuple(interfaces)
        self._sockets: dict[tuple[int, int], list[socket.socket]] = {}
        if not interfaces:
            raise RuntimeFailure("delegates without an interface: give at least one local address")
        try:
            for post in [PRESENCE, *((kind, place) for kind in range(KINDS) for place in range(num_places))]:
                made = self._sockets[post] = []
                for address in interfaces:
                    made.append(self._listen(address))
        except BaseException:
            self.close()
            raise

    def _listen(self, address: str) -> socket.socket:
        try:
            made = socket.socket(family_of(address), socket.SOCK_STREAM)
        except OSError as error:
            raise cannot(error) from None
        try:
            made.bind((address, 0))
            made.listen(BACKLOG)
            made.setblocking(False)
        except OSError as error:
            made.close()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise cannot(error) from None
            raise RuntimeFailure(
                f"interface {address!r}: {error.strerror}; give addresses of this host, as `ip address` lists them"
            ) from None
        return made

    def ports(self) -> list[tuple[int, int, list[tuple[str, int]]]]:
        """For each kind and place, the address and port on each interface: what the other ranks are told."""
        return [
            (
                kind,
                place,
                [(address, one.getsockname()[1]) for address, one in zip(self.interfaces, made, strict=True)],
            )
            for (kind, place), made in self._sockets.items()
        ]

    def of(self, kind: int, place: int) -> list[socket.socket]:
        return self._sockets[kind, place]

    def close(self) -> None:
        for made in self._sockets.values():
            for one in made:
                one.close()
        self._sockets.clear()
