"""What the process group's errors mean: a peer that is gone, or a deadline that passed."""

from __future__ import annotations

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure

_TIMEOUT_WORDS = ("timed out", "timeout")


def explain(error: Exception, rank: int, peer: int | None, what: str, timeout: float) -> RuntimeFailure:
    """The error of a failed wait that says who waited for what from whom; `peer` is None for all the others."""
    if isinstance(error, RuntimeFailure):
        return error
    source = "the other ranks" if peer is None else f"rank {peer}"
    if any(word in str(error).lower() for word in _TIMEOUT_WORDS):
        return DeadlineExceeded(
            f"rank {rank} waited {timeout:g} s for {what} from {source}; if that is just slow, give a longer "
            f"timeout; if not, it stands still or was given other batches or calls"
        )
    return PeerLost(f"rank {rank} lost its connection to {source} while it waited for {what}")
