"""Which exceptions are another rank's fault: the words of gloo, NCCL and the store, told apart in one place."""

from __future__ import annotations

from enum import Enum

from penstock.runtime.errors import DeadlineExceeded, PeerLost

__all__ = ["LossKind", "loss_of"]

LATE = (
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "socket timeout",
)
LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "timeout caused pair closure",  # another wait on the same pair timed out before: the pair is gone
    "connection was likely closed",
    "broken pipe",
    "connection refused",
    "failed to recv, got 0 bytes",
    "ncclremoteerror",
    "remote process exited",
)


class LossKind(Enum):
    """A peer is gone, or nothing came from it in time."""

    LOST = "lost"
    LATE = "late"


def loss_of(error: BaseException) -> LossKind | None:
    """What an exception of ours or of torch.distributed says of a peer; None when it is about this rank."""
    if isinstance(error, PeerLost):
        return LossKind.LOST
    if isinstance(error, DeadlineExceeded):
        return LossKind.LATE
    if not isinstance(error, (RuntimeError, ConnectionError)):
        return None
    text = str(error).lower()
    if isinstance(error, ConnectionError) or any(words in text for words in LOST):
        return LossKind.LOST
    return LossKind.LATE if any(words in text for words in LATE) else None
