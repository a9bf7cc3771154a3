"""A process group of torch's as it is used here: not kept alive, and what its errors mean."""

from __future__ import annotations

import atexit
import sys
import weakref
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure


class WeakGroup:
    """A group that torch.distributed holds until it is destroyed.

    A group's own threads end when its last reference goes, which is to be in `dist.destroy_process_group()`. Where
    something keeps the group, they run on while Python shuts down; one that lets go of a tensor just then ends the
    process with "terminate called without an active exception". So a pipeline keeps none, and what torch keeps is let
    go at exit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    @property
    def is_alive(self) -> bool:
        return self._group() is not None

    def __call__(self) -> dist.ProcessGroup:
        """The group. Raises RuntimeFailure where it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeFailure(
                "the process group that this pipeline ran over is gone; call dist.destroy_process_group() last"
            )
        return group


@atexit.register
def let_go_of_defaults() -> None:
    """Drops the groups that are default arguments of torch.distributed.nn's functions.

    An optimizer imports that module. Where that happens once a group is there, its functions keep it for good: their
    `group=group.WORLD` is worked out then. Nothing calls them any more when Python ends.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in list(vars(module).values()) if module is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            kept = (None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(kept)


_TIMEOUT_WORDS = ("timed out", "timeout")


def is_of_a_group(error: Exception) -> bool:
    """Whether a process group raised an error, which may come out of any op that waits for other processes."""
    module = sys.modules.get("torch.distributed")
    known = module is not None and isinstance(error, module.DistError)
    return known or any(word in str(error) for word in ("/gloo/", "NCCL"))


def is_late(error: Exception) -> bool:
    """Whether a wait ended because its deadline passed."""
    return any(word in str(error).lower() for word in _TIMEOUT_WORDS)


def wait_for(work: Any, rank: int, peer: int | None, what: str, timeout: float) -> None:
    """Waits for an op of a group; see `explain`.

    Raises:
        DeadlineExceeded, PeerLost: with who waited for what from whom.
    """
    try:
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        raise explain(error, rank, peer, what, timeout) from None


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
