"""What the process group's errors mean: a peer that is gone, or a deadline that passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.runtime.errors import DeadlineExceeded, PeerLost

_TIMEOUT_WORDS = ("timed out", "timeout")


@contextmanager
def explained(rank: int, peer: int, what: str, timeout: float) -> Iterator[None]:
    """Turns a failed wait into an error that says who waited for what from whom.

    Raises:
        DeadlineExceeded: nothing came within `timeout` seconds.
        PeerLost: the connection to `peer` is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if any(word in str(error).lower() for word in _TIMEOUT_WORDS):
            raise DeadlineExceeded(
                f"rank {rank} waited {timeout:g} s for {what} from rank {peer}; if that rank is just slow, "
                f"give a longer timeout"
            ) from None
        raise PeerLost(f"rank {rank} lost its connection to rank {peer} while it waited for {what}") from None
