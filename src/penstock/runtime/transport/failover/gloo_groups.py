"""Groups of gloo over an interface of our choice, made without a store that could be gone; and the end of theirs.

gloo never gives up a connection whose network went silent, and nothing of torch's ends an op of gloo's that waits. So
the sockets are found among this process's by the port that gloo listens on, and shut down: all that waits then fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

Endpoint = tuple[str, int]
_DESCRIPTORS = Path("/proc/self/fd")
MAKING = 5.0
"""Seconds that the ranks of a group get to connect."""


class ToldStore(dist.Store):
    """What gloo needs to know to connect, told by other means.

    Args:
        tell: tells everyone a value under a key.
        told: waits for a key; raises RuntimeError where that has no use any more.
    """

    def __init__(self, tell: Callable[[str, str], None], told: Callable[[str], str]) -> None:
        super().__init__()
        self._tell, self._told = tell, told

    def set(self, key: str, value: bytes | str) -> None:
        self._tell(key, (value.encode() if isinstance(value, str) else bytes(value)).hex())

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._told(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._told(key)

    def has_extended_api(self) -> bool:
        return False


class GlooDevice:
    """An interface that gloo listens on.

    Attributes:
        endpoint: where.
    """

    def __init__(self, address: str) -> None:
        before = set(_listening(address))
        self._device = dist.ProcessGroupGloo.create_device(hostname=address)
        self.endpoint: Endpoint = next(iter(set(_listening(address)) - before), (address, 0))

    def group(self, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> Any:
        """A group over it. Raises RuntimeError where its ranks can't connect."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [self._device], timedelta(seconds=MAKING)
        made = dist.ProcessGroupGloo(store, rank, num_ranks, options)
        made.set_timeout(timedelta(seconds=timeout))
        return made


def cut(endpoints: Collection[Endpoint]) -> int:
    """Ends this process's connections to or from these; returns how many."""
    num = 0
    for one in _sockets():
        with contextlib.suppress(OSError):
            if _end(one.getpeername()) in endpoints or _end(one.getsockname()) in endpoints:
                one.shutdown(socket.SHUT_RDWR)
                num += 1
    return num


def _listening(address: str) -> Iterator[Endpoint]:
    for one in _sockets():
        with contextlib.suppress(OSError):
            end = _end(one.getsockname())
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and end[0] == address:
                yield end


def _sockets() -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets, each as long as it is looked at."""
    for path in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield one


def _end(name: Any) -> Endpoint:
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
