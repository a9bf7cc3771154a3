"""Collective ops over a process group, and what its errors mean.

    work = peers.start(all_reduce, tensor)      begins the op; `tensor` is its own until it is done
    peers.wait_for(work, "a sum")               afterwards `tensor` is the sum

Every wait must end after the limit that it is given: in between, a rank looks whether a link was lost. Not all of
torch's waits do: gloo's `reduce_scatter` gives something to wait for that ignores its limit.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch import Tensor

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
_GROUP_WORDS = ("/gloo/", "NCCL", "Application timeout caused pair closure")
"""The last is gloo's, of an op on the connection of another one whose time was up."""


def is_of_a_group(error: Exception) -> bool:
    """Whether a process group raised an error, which may come out of any op that waits for other processes."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _GROUP_WORDS)


def is_late(error: Exception) -> bool:
    """Whether a wait ended because its deadline passed."""
    return any(word in str(error).lower() for word in _TIMEOUT_WORDS)


def wait_for(work: Any, rank: int, peer: int | None, what: str, timeout: float) -> None:
    """Waits for an op of a group. Raises as `explained`."""
    with explained(rank, peer, what, timeout) as limit:
        work.wait(limit)


@contextmanager
def explained(rank: int, peer: int | None, what: str, timeout: float) -> Iterator[timedelta]:
    """Around what is done with a group; gives how long a wait there may take. See `explain`.

    Raises:
        DeadlineExceeded, PeerLost: with who waited for what from whom.
    """
    try:
        yield timedelta(seconds=timeout)
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


def all_reduce(group: Any, tensor: Tensor) -> Any:
    """Begins a sum that every rank gets, in place; returns what to wait for."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def reduce(group: Any, tensor: Tensor, root: int) -> Any:
    """Begins a sum that rank `root` gets, in place. On the others the tensor holds nothing of use afterwards."""
    return dist.reduce(tensor, group=group, group_dst=root, async_op=True)


def broadcast(group: Any, tensor: Tensor, root: int) -> Any:
    """Begins to give every rank the values of rank `root`."""
    return dist.broadcast(tensor, group=group, group_src=root, async_op=True)


def gather(group: Any, mine: Tensor, rows: list[Tensor] | None, root: int) -> Any:
    """Begins to give rank `root` the values of all ranks, in its `rows`; the other ranks give None for `rows`."""
    return dist.gather(mine, rows, group=group, group_dst=root, async_op=True)


FEW_BYTES = 1 << 20
"""Most bytes, of all ranks together, where each rank sends its values to each other one by itself."""


def all_gather(group: Any, mine: Tensor, rows: Tensor) -> Any:
    """Begins to give every rank all ranks' values.

    Many values go round a ring, so that no rank sends more than all have. In a ring of n ranks each of n - 1 rounds
    waits for the round before it, and one late link delays all of them. So few values go from each rank to each other
    one directly, which that link delays once:

        ring    0 -> 1 -> 2 -> 3 -> 0      with 0:1 late by 60 ms each way 370 ms, a sum 740 (4 ranks, gloo)
        direct  0 -> 1, 2, 3 and so on     120 ms: gloo sends once the receiver has said that it is ready

    Args:
        mine: this rank's values. rows: those of all ranks afterwards, a row for each.
    """
    num_ranks = len(rows)
    if not is_direct(mine, num_ranks):
        return dist.all_gather(list(rows.unbind(0)), mine, group=group, async_op=True)
    sent = mine.expand(num_ranks, *mine.shape).contiguous()
    return group.alltoall_base(rows.view(num_ranks, -1), sent.view(num_ranks, -1), [], [])


def is_direct(mine: Tensor, num_ranks: int) -> bool:
    """Whether such values go directly from each rank to each other one."""
    return mine.device.type == "cpu" and 0 < mine.numel() * mine.element_size() * num_ranks <= FEW_BYTES


def reduce_scatter(group: Any, rows: Sequence[Tensor], part: Tensor) -> Any:
    """Begins a sum of which every rank gets a part.

    Args:
        rows: what this rank adds to each part, which holds nothing of use afterwards. part: for this rank's part.
    """
    if part.device.type != "cpu":
        return dist.reduce_scatter(part, list(rows), group=group, async_op=True)
    works = [dist.reduce(row, group=group, group_dst=r, async_op=True) for r, row in enumerate(rows)]
    return _PartWork(works, rows[group.rank()], part)


class _PartWork:
    """The sums of all parts, each towards the rank that gets it: bitwise gloo's own `reduce_scatter`, which can't be
    waited for with a limit."""

    def __init__(self, works: Sequence[Any], found: Tensor, part: Tensor) -> None:
        self._works, self._found, self._part = works, found, part

    def wait(self, limit: timedelta) -> None:
        end = time.monotonic() + limit.total_seconds()
        for work in self._works:
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        self._part.copy_(self._found)
