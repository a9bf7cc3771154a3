"""A store as adapting uses it: what failed is tried again, and it is known for how long the store has not answered.

Each line belongs to one thread. Any other may ask how long it has been silent, and close it, even while a call stands
still because the store's process does.
"""

from __future__ import annotations

import time

from penstock.runtime.adapt.store import Store, StoreLost

PAUSE = 0.25
"""Seconds between two tries while the store is gone."""


class StoreClient:
    """A connection that does not raise.

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
