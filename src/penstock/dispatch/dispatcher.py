"""One rank's decisions, as the runtime asks for them.

Dispatcher         any policy: the core's functions around the arrays they share
FrozenDispatcher   a rank that runs the next op of its order and no other, for which two counters do
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.dispatch.graph import Graph
from penstock.dispatch.policy import Dispatch
from penstock.engine import decider
from penstock.engine.decider import RankState


class Dispatcher:
    """Decides for one rank. Feed it what happened (`finish`, `arrive`), ask it what to run (`next`).

    Args:
        graph: the schedule, lowered.
        rank: the rank that it decides for.
        dispatch: the policy.
        memory_change: per op, what it adds to the activations held (F) or takes away.
        cap: most activations the rank may hold where dispatch is not frozen.
    """

    def __init__(
        self, graph: Graph, rank: int, dispatch: Dispatch, memory_change: Sequence[float], cap: float
    ) -> None:
        self.graph, self.rank, self.dispatch = graph, rank, dispatch
        self._network, num_rows = graph.lists, graph.num_rows
        self._missing = list(graph.num_needed)
        self._state = RankState(
            memory_change=memory_change,
            cap=[cap] * num_rows,
            missing=self._missing,
            done=[0] * graph.num_ops,
            head=list(graph.queue_first[:-1]),
            next_frozen=list(graph.first[:-1]),
            held=[0.0] * num_rows,
            warmup_left=[0] * num_rows,
            under_way=[0.0] * graph.num_ranks if graph.has_streams else None,
        )
        self._freed = graph.own_successors(rank)
        self._left = graph.first[rank + 1] - graph.first[rank]
        self._rows: tuple[int, ...] = (rank,)
        if graph.has_streams:
            stream = graph.num_ranks + rank
            self._rows = rank, stream
            self._left += graph.first[stream + 1] - graph.first[stream]

    @property
    def finished(self) -> bool:
        """Whether the rank has started all its ops."""
        return self._left == 0

    @property
    def held(self) -> float:
        """Activations the rank holds now."""
        return sum(self._state.held[row] for row in self._rows)

    def next(self) -> int | None:
        """The op to run now, or None to wait. The op counts as started."""
        return self._next(self.rank)

    def next_async(self) -> int | None:
        """The asynchronous op to start now, or None. It does not wait for those before it to end."""
        return self._next(self._rows[1]) if len(self._rows) > 1 else None

    def _next(self, row: int) -> int | None:
        op = decider.decide(self.dispatch.code, row, self._network, self._state)
        return None if op == decider.NOTHING else self._take(row, op)

    def _take(self, row: int, op: int) -> int:
        """Counts an op as started."""
        decider.start(row, op, self._network, self._state)
        self._left -= 1
        return op

    def finish(self, op: int) -> None:
        """`op` ended on this rank: what it frees is free, and its successors here have one need less."""
        decider.finish(self.graph.rank[op], op, self._state)
        for successor in self._freed[op]:
            self._missing[successor] -= 1

    def arrive(self, op: int) -> None:
        """A message that `op` needs has arrived from another rank."""
        self._missing[op] -= 1

    def first_awaited(self) -> int | None:
        """The first op in frozen order that is not started: what a frozen rank waits for."""
        op = self._state.next_frozen[self.rank]
        return op if op < self.graph.first[self.rank + 1] else None


class FrozenDispatcher(Dispatcher):
    """The decisions of a rank without streams that runs the next op of its order.

    The core's `decide` makes the same ones under FROZEN. Here two counters are enough.

    Args:
        graph: the schedule, lowered.
        rank: the rank that it decides for.
        memory_change: per op, what it adds to the activations held (F) or takes away.
    """

    def __init__(self, graph: Graph, rank: int, memory_change: Sequence[float]) -> None:
        super().__init__(graph, rank, Dispatch.FROZEN, memory_change, math.inf)
        self._op, self._end = graph.first[rank], graph.first[rank + 1]
        self._memory_change, self._held = memory_change, self._state.held

    @property
    def finished(self) -> bool:
        return self._op == self._end

    def next(self) -> int | None:
        op = self._op
        if op == self._end or self._missing[op]:
            return None
        self._op = op + 1
        if (change := self._memory_change[op]) > 0:
            self._held[self.rank] += change
        return op

    def finish(self, op: int) -> None:
        if (change := self._memory_change[op]) < 0:
            self._held[self.rank] += change
        for successor in self._freed[op]:
            self._missing[successor] -= 1

    def first_awaited(self) -> int | None:
        return self._op if self._op < self._end else None
