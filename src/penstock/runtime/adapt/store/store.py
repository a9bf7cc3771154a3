"""What a store is: named queues of bytes that every rank reaches, and that may be gone for a while.

    rank 3 --push("to-0", report)--> | to-0 | --pop("to-0")--> rank 0

Training never waits for it: what is lost with a store is lost.
"""

from __future__ import annotations

from typing import Protocol

from penstock.runtime.errors import RuntimeFailure


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
