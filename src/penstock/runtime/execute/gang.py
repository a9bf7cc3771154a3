"""Ranks that run an op together meet here. The op runs when the last of them has come.

    rank 0 | F0 F1 ........ GATHER0 B0      stands until rank 1 is there, then runs the op
    rank 1 | F0 .. F1 F2    GATHER0 B0      finds the result

Ranks that take turns in one thread have a `Gang`: the first of them runs the op for all. Ranks with a thread or a
process of their own each run their own part, and the op itself brings the parts together, with a collective for
example. An emulated op has no such collective. A barrier replaces it, and tells all ranks when the last one came.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.dispatch import Graph
from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.mesh.collective import WeakGroup, explain
from penstock.runtime.mesh.peers import Peers
from penstock.schedule import Op


class Gang:
    """Who has arrived at which op, in one step of the ranks of this process, which take turns."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sizes = [last - first for first, last in pairwise(graph.gang_first)]
        self._arrived: list[set[int]] = [set() for _ in self._sizes]
        self._outcomes: dict[Op, tuple[Any, int]] = {}

    def arrive(self, number: int) -> None:
        """A rank stands ready for its part of an op."""
        self._arrived[self._graph.gang[number]].add(number)

    def is_whole(self, number: int) -> bool:
        """Whether all ranks of an op have arrived at it."""
        gang = self._graph.gang[number]
        return len(self._arrived[gang]) == self._sizes[gang]

    def may_run(self, number: int) -> bool:
        """Whether all have arrived, and the first of the ranks has run it, where this is another one's part."""
        return self.is_whole(number) and (self.is_first(number) or self._graph.ops[number] in self._outcomes)

    def is_first(self, number: int) -> bool:
        """Whether this part of an op is that of the first of its ranks, which runs it."""
        return self._graph.number[self._graph.ops[number]] == number

    def leave(self, op: Op, outcome: Any) -> None:
        """Leaves what came of an op for the other ranks."""
        self._outcomes[op] = outcome, self._sizes[self._graph.gang[self._graph.number[op]]] - 1

    def find(self, op: Op) -> Any:
        """What the first rank left; gone once all others have it."""
        outcome, left = self._outcomes[op]
        if left > 1:
            self._outcomes[op] = outcome, left - 1
        else:
            del self._outcomes[op]
        return outcome

    def absent(self, number: int) -> list[int]:
        """The ranks that have not arrived."""
        graph, gang = self._graph, self._graph.gang[number]
        members = graph.gang_ops[graph.gang_first[gang] : graph.gang_first[gang + 1]]
        return [graph.host(n) for n in members if n not in self._arrived[gang]]


class Barrier(Protocol):
    """Where ranks meet that have a clock in common, and a thread or a process each.

    Both methods wait until all have come, and return the last of their moments (ns of that clock).

    Raises:
        DeadlineExceeded, PeerLost: with who did not come.
    """

    def begin(self, rank: int, moment: int) -> int:
        """All ranks come to the begin of a step."""

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        """All of `ranks` come to `op`, this one being ready for it from `moment` on."""


class ThreadBarrier:
    """Of ranks that are threads of this process.

    Args:
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self._ranks, self._timeout = range(num_ranks), timeout
        self._changed = threading.Condition()
        self._moments: dict[Hashable, dict[int, int]] = {}
        self._left: dict[Hashable, int] = {}
        self._lost: int | None = None

    def lose(self, rank: int) -> None:
        """Lets all who wait know that a rank failed."""
        with self._changed:
            self._lost = rank
            self._changed.notify_all()

    def begin(self, rank: int, moment: int) -> int:
        return self._last("the begin of a step", rank, self._ranks, moment)

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        return self._last(op, rank, ranks, moment)

    def _last(self, what: Hashable, rank: int, ranks: Sequence[int], moment: int) -> int:
        with self._changed:
            moments = self._moments.setdefault(what, {})
            moments[rank] = moment
            self._changed.notify_all()
            came = self._changed.wait_for(lambda: self._lost is not None or len(moments) == len(ranks), self._timeout)
            absent = ", ".join(str(r) for r in ranks if r not in moments)
            if absent and self._lost is not None:
                raise PeerLost(f"rank {self._lost} failed; rank {rank} waits at {what} for rank {absent}")
            if not came:
                raise DeadlineExceeded(f"rank {rank} waited {self._timeout:g} s at {what} for rank {absent}")
            self._left[what] = self._left.get(what, len(ranks)) - 1
            if not self._left[what]:  # the next step has the same ops
                del self._left[what], self._moments[what]
            return max(moments.values())


class ProcessBarrier:
    """Of ranks that are processes of one host, whose clocks are one.

    Args:
        groups: for each kind of op on a stage the ranks that run it. One group an order of ops: what another thread
            meets for must have its own.
    """

    def __init__(self, peers: Peers, groups: Mapping[tuple[str, int], WeakGroup], timeout: float) -> None:
        self._peers, self._groups, self._timeout = peers, groups, timeout

    def begin(self, rank: int, moment: int) -> int:
        return int(max(self._peers.gather(moment)))

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        latest = torch.tensor([moment])
        group = self._groups[op.kind, op.stage]()
        try:
            work = dist.all_reduce(latest, dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise explain(error, rank, None, f"them to come to {op}", self._timeout) from None
        return int(latest)
