"""One rank's decisions, as the runtime asks for them: the core's functions around the arrays they share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.dispatch.graph import Graph
from penstock.dispatch.policy import Dispatch
from penstock.engine import decider


class Dispatcher:
    """Decides for one rank. Feed it what happened (`finish`, `arrive`), ask it what to run (`next`).

    Args:
        graph: the schedule, lowered.
        rank: the rank that it decides for.
        dispatch: the policy.
        memory_change: per op, what it adds to the activations held (F) or takes away.
        cap: most activations the rank may hold where dispatch is not frozen.

    The log lists events and decisions in order, as (what, op number), so a run can be replayed.
    """

    def __init__(
        self, graph: Graph, rank: int, dispatch: Dispatch, memory_change: Sequence[float], cap: float
    ) -> None:
        self.graph, self.rank, self.dispatch = graph, rank, dispatch
        self.log: list[tuple[str, int]] = []
        self._missing = list(graph.num_needed)
        self._done = [0] * graph.num_ops
        self._next_frozen = list(graph.first[:-1])
        self._head = list(graph.queue_first[:-1])
        self._memory_change = memory_change
        self._held = [0.0] * graph.num_rows
        self._beside = graph.beside
        self._cap = [cap] * graph.num_rows
        self._warmup_left = [0] * graph.num_rows
        # What does not change from decision to decision is bound once.
        self._decide = partial(decider.decide, dispatch.code)
        self._what = (
            graph.first, graph.queue_rank_first, graph.queue_first, graph.queue_ops, self._head, graph.priority,
            self._missing, self._done, self._next_frozen, memory_change, self._held, self._cap, self._warmup_left,
            graph.gang, self._beside,
        )  # fmt: skip
        self._begun = (
            self._done, graph.first, self._next_frozen, self._head, graph.queue_of, graph.priority, memory_change,
            self._held, self._warmup_left,
        )  # fmt: skip
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
        held = self._held[self.rank]
        return held if len(self._rows) == 1 else held + self._held[self._rows[1]]

    def next(self) -> int | None:
        """The op to run now, or None to wait. The op counts as started."""
        return self._next(self.rank)

    def next_apart(self) -> int | None:
        """The asynchronous op to start now, or None. It does not wait for those before it to end."""
        return self._next(self._rows[1]) if len(self._rows) > 1 else None

    def _next(self, rank: int) -> int | None:
        op = self._decide(rank, *self._what)
        return None if op == decider.NOTHING else self._take(rank, op)

    def _take(self, rank: int, op: int) -> int:
        """Counts an op as started."""
        decider.start(rank, op, *self._begun)
        if self._beside:
            self._note(op, 1)
        self._left -= 1
        self.log.append(("run", op))
        return op

    def _note(self, op: int, sign: int) -> None:
        change = self._memory_change[op]
        if change < 0:
            decider.note_under_way(
                self.graph.rank[op], sign * change, self.graph.num_rows, self.graph.num_ops, self._beside
            )

    def finish(self, op: int) -> None:
        """`op` ended on this rank: what it frees is free, and its successors here have one need less."""
        decider.finish(self.graph.rank[op], op, self._memory_change, self._held)
        if self._beside:
            self._note(op, -1)
        self.log.append(("finish", op))
        for successor in self._freed[op]:
            self._missing[successor] -= 1

    def arrive(self, op: int) -> None:
        """A message that `op` needs has arrived from another rank."""
        self._missing[op] -= 1
        self.log.append(("arrive", op))

    def first_awaited(self) -> int | None:
        """The first op in frozen order that is not started: what a frozen rank waits for."""
        op = self._next_frozen[self.rank]
        return op if op < self.graph.first[self.rank + 1] else None

    def awaited(self) -> list[int]:
        """Ops not started, in frozen order: the first is what a frozen rank waits for."""
        last = self.graph.first[self.rank + 1]
        return [o for o in range(self._next_frozen[self.rank], last) if not self._done[o]]
