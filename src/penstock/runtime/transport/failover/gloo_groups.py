"""Groups of gloo over an interface of our choice, made without a store that could be gone.

gloo never gives up a connection whose network went silent, does not end a wait for a message whose connection ended
in its middle, and may end the process where its sockets are shut down from outside. So a group that broke is left
alone, and what waits for it is let wait.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MAKING = 5.0
"""Seconds that the ranks of a group get to connect."""


class RelayedStore(dist.Store):
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
    """An interface that gloo listens on."""

    def __init__(self, address: str) -> None:
        self._device = dist.ProcessGroupGloo.create_device(hostname=address)

    def group(self, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> Any:
        """A group over it. Raises RuntimeError where its ranks can't connect."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [self._device], timedelta(seconds=MAKING)
        made = dist.ProcessGroupGloo(store, rank, num_ranks, options)
        made.set_timeout(timedelta(seconds=timeout))
        return made
