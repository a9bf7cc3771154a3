"""What the process group's errors mean: a peer that is gone, or a deadline that passed."""

from __future__ import annotations

import sys

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure

_TIMEOUT_WORDS = ("timed out", "timeout")


def is_of_a_group(error: Exception) -> bool:
    """Whether a process group raised an error, which may come out of any op that waits for other processes."""
    module = sys.modules.get("torch.distributed")
    known = module is not None and isinstance(error, module.DistError)
    return known or any(word in str(error) for word in ("/gloo/", "NCCL"))


def is_late(error: Exception) -> bool:
    """Whether a wait ended because its deadline passed."""
    return any(word in str(error).lower() for word in _TIMEOUT_WORDS)


def explain(error: Exception, rank: int, peer: int | None, what: str, timeout: float) -> RuntimeFailure:
    """The error of a failed wait that says who waited for what from whom; `peer` is None for all the others."""
    if isinstance(error, RuntimeFailure):
        return error
    source = "the other ranks" if peer is None else f"rank {peer}"
    if is_late(error):
        return DeadlineExceeded(
            f"rank {rank} waited {timeout:g} s for {what} from {source}; if that is just slow, give a longer "
            f"timeout; if not, it is stuck, or was given other batches or calls"
        )
    return PeerLost(f"rank {rank} lost its connection to {source} while it waited for {what}")
