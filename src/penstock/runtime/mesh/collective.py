"""Collective ops over a process group, which may be done again on another group of the same ranks where one broke.

    one = peers.start(AllReduce(lambda: values.clone()))    begins it; once more on another group where that fails
    one.wait(limit)
    one.tensor                                              the sum

An op keeps what it was given until it is done on every rank. Where it must be done again, it begins with a buffer of
its own, for the op that failed may still write into the one before. A rank on which it was done takes part for the
others' sake: what it has, and may be reading just now, stays as it is.

Every wait must end after the limit that it is given: in between, a rank that waits for an op of a group that broke
learns of the next group. Not all of torch's do: gloo's `reduce_scatter` gives something to wait for that ignores it.

The functions at the top hold a group of torch's without keeping it alive, and say what its errors mean.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any, Protocol

import torch
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
    module = sys.modules.get("torch.distributed")
    known = module is not None and isinstance(error, module.DistError)
    return known or any(word in str(error) for word in _GROUP_WORDS)


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


class Collective(Protocol):
    """One op of all ranks of a group.

    Attributes:
        is_meeting: whether a rank on which it is done knows that every rank had begun it.
    """

    is_meeting: bool

    def start(self, group: Any) -> Any:
        """Begins it; returns what to wait for, for no longer than is said."""

    def again(self, group: Any, done: Collection[int]) -> Any | None:
        """Begins it on another group; None where nobody needs that.

        Args:
            done: the ranks on which it was done, not all of them, the same on every rank that calls this.
        """


class AllReduce:
    """A sum that every rank gets.

    Args:
        fill: makes a tensor with what this rank adds, the same until the op is done here.

    Attributes:
        tensor: afterwards the sum.
    """

    is_meeting = True

    def __init__(self, fill: Callable[[], Tensor]) -> None:
        self._fill = fill
        self.tensor = fill()

    def start(self, group: Any) -> Any:
        return dist.all_reduce(self.tensor, group=group, async_op=True)

    def again(self, group: Any, done: Collection[int]) -> Any:
        """Where some rank has the sum it gives it to the others: what went into it may be gone by now."""
        if not done:
            self.tensor = self._fill()
            return self.start(group)
        mine = group.rank()
        if mine not in done:
            self.tensor = torch.empty_like(self.tensor)
        given = self.tensor if mine == min(done) or mine not in done else torch.empty_like(self.tensor)
        return dist.broadcast(given, group=group, group_src=min(done), async_op=True)


class Reduce:
    """A sum that one rank gets.

    Args:
        fill: as for `AllReduce`; on the others than `root` the same until the op is done at `root`.
    """

    is_meeting = False

    def __init__(self, fill: Callable[[], Tensor], root: int) -> None:
        self._fill, self._root = fill, root
        self.tensor = fill()

    def start(self, group: Any) -> Any:
        return dist.reduce(self.tensor, group=group, group_dst=self._root, async_op=True)

    def again(self, group: Any, done: Collection[int]) -> Any | None:
        if self._root in done:
            return None
        self.tensor = self._fill()
        return self.start(group)


class Broadcast:
    """One rank's values for all.

    Args:
        tensor: with the values on rank `root`; a buffer that nothing else is done with.
    """

    is_meeting = False

    def __init__(self, tensor: Tensor, root: int) -> None:
        self.tensor, self._root = tensor, root

    def start(self, group: Any) -> Any:
        return dist.broadcast(self.tensor, group=group, group_src=self._root, async_op=True)

    def again(self, group: Any, done: Collection[int]) -> Any:
        mine = group.rank()
        if mine not in done and mine != self._root:
            self.tensor = torch.empty_like(self.tensor)
        own = mine == self._root or mine not in done
        given = self.tensor if own else torch.empty_like(self.tensor)
        return dist.broadcast(given, group=group, group_src=self._root, async_op=True)


FEW_BYTES = 1 << 20
"""What a rank may send in all where it sends its values to each other rank by itself."""


class AllGather:
    """Every rank's values for all.

    Many values go round a ring, so that no rank sends more than all have. In a ring of n ranks each of n - 1 rounds
    waits for the round before it, and one late link delays all of them. So few values go from each rank to each other
    one directly, which that link delays once:

        ring    0 -> 1 -> 2 -> 3 -> 0      with 0:1 late by 60 ms each way 370 ms, a sum 740 (4 ranks, gloo)
        direct  0 -> 1, 2, 3 and so on     120 ms: gloo sends once the receiver has said that it is ready

    Args:
        mine: this rank's; a buffer that nothing else is done with.
        tensor: one for all of them, with a dimension for the ranks in front.
    """

    is_meeting = True

    def __init__(self, mine: Tensor, tensor: Tensor) -> None:
        self._mine, self.tensor = mine, tensor

    @staticmethod
    def is_direct(mine: Tensor, num_ranks: int) -> bool:
        """Whether such values go directly from each rank to each other one."""
        return mine.device.type == "cpu" and 0 < mine.numel() * mine.element_size() * num_ranks <= FEW_BYTES

    def start(self, group: Any) -> Any:
        return self._begin(group, self.tensor)

    def again(self, group: Any, done: Collection[int]) -> Any:
        tensor = torch.empty_like(self.tensor)
        if group.rank() not in done:
            self.tensor = tensor
        return self._begin(group, tensor)

    def _begin(self, group: Any, tensor: Tensor) -> Any:
        num_ranks = len(tensor)
        if not self.is_direct(self._mine, num_ranks):
            return dist.all_gather(list(tensor.unbind(0)), self._mine, group=group, async_op=True)
        sent = self._mine.expand(num_ranks, *self._mine.shape).contiguous()
        return group.alltoall_base(tensor.view(num_ranks, -1), sent.view(num_ranks, -1), [], [])


class ReduceScatter:
    """A sum of which every rank gets a part.

    Args:
        rows: what this rank adds to each part; buffers that nothing else is done with.
        tensor: for this rank's part.
    """

    is_meeting = True

    def __init__(self, rows: Sequence[Tensor], tensor: Tensor) -> None:
        self._rows, self.tensor = list(rows), tensor

    def start(self, group: Any) -> Any:
        return self._begin(group, self.tensor)

    def again(self, group: Any, done: Collection[int]) -> Any:
        part = torch.empty_like(self.tensor)
        if group.rank() not in done:
            self.tensor = part
        return self._begin(group, part)

    def _begin(self, group: Any, part: Tensor) -> Any:
        if part.device.type != "cpu":
            return dist.reduce_scatter(part, self._rows, group=group, async_op=True)
        rows = [row.clone() for row in self._rows]  # a sum towards another rank leaves them as it likes
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
