"""Where emulated ranks meet for an op that they run together: it begins on all when the last of them is ready.

rank 1 | F0 F1 ~~~~~~ GATHER0 B0      a rank says from when on it is ready, and all learn the last such moment
rank 3 | F0 .. F1 F2  GATHER0 B0
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.mesh.failure import explain
from penstock.runtime.mesh.weak_group import WeakGroup
from penstock.schedule import Op


class EmulatedGang(Protocol):
    """Where ranks meet."""

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        """Waits until all of `ranks` have come to `op`, this one being ready from `moment` on (ns of a clock that all
        share); returns the last moment of all.

        Raises:
            DeadlineExceeded, PeerLost: with who did not come.
        """


class ThreadGang:
    """Of ranks that are threads of this process.

    Args:
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._moments: dict[Op, dict[int, int]] = {}
        self._left: dict[Op, int] = {}
        self._lost: int | None = None

    def lose(self, rank: int) -> None:
        """Lets all who wait know that a rank failed."""
        with self._changed:
            self._lost = rank
            self._changed.notify_all()

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        with self._changed:
            moments = self._moments.setdefault(op, {})
            moments[rank] = moment
            self._changed.notify_all()
            came = self._changed.wait_for(lambda: self._lost is not None or len(moments) == len(ranks), self._timeout)
            absent = ", ".join(str(r) for r in ranks if r not in moments)
            if absent and self._lost is not None:
                raise PeerLost(f"rank {self._lost} failed; rank {rank} waits at {op} for rank {absent}")
            if not came:
                raise DeadlineExceeded(f"rank {rank} waited {self._timeout:g} s at {op} for rank {absent}")
            self._left[op] = self._left.get(op, len(ranks)) - 1
            if not self._left[op]:  # the next step has the same ops
                del self._left[op], self._moments[op]
            return max(moments.values())


class ProcessGang:
    """Of ranks that are processes of one host, whose clocks are one.

    Args:
        groups: for each kind of op on a stage the ranks that run it. One group an order of ops: what another thread
            meets for must have its own.
    """

    def __init__(self, groups: Mapping[tuple[str, int], WeakGroup], timeout: float) -> None:
        self._groups, self._timeout = groups, timeout

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        latest = torch.tensor([moment])
        group = self._groups[op.kind, op.stage]()
        try:
            work = dist.all_reduce(latest, dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise explain(error, rank, None, f"them to come to {op}", self._timeout) from None
        return int(latest)
