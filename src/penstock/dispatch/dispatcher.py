"""How a rank picks its next op, and one rank's decisions as the runtime asks for them.

Dispatch, Policy   which of the ready ops is picked, and whether a rank waits for one that is nearly due
Dispatcher         one rank under any policy: the core's functions around the arrays they share
FrozenDispatcher   a rank that runs the next op of its order and no other, for which two counters do
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

from penstock.dispatch.graph import Graph
from penstock.engine import decider
from penstock.engine.decider import RankState
from penstock.schedule import ScheduleError


class Dispatch(StrEnum):
    """How a rank picks its next op."""

    FROZEN = "frozen"
    """Only the next of its order."""
    HINTED = "hinted"
    """Of the ready ops that fit, the earliest in its order."""
    DYNAMIC = "dynamic"
    """Of the ready ops that fit, B or I before F before W: class first."""

    @property
    def is_dynamic(self) -> bool:
        """Whether a rank may run any ready op, so that its cap on activations counts."""
        return self is not Dispatch.FROZEN

    @property
    def code(self) -> int:
        """The core's number for it."""
        return _CODES[self]


_CODES = {Dispatch.FROZEN: decider.FROZEN, Dispatch.HINTED: decider.HINTED, Dispatch.DYNAMIC: decider.CLASS_FIRST}


@dataclass(frozen=True)
class Policy:
    """A dispatch, and how long a rank waits for an op that is nearly due. Written "hinted", or "hinted:0.5".

    A rank that has picked a ready op looks for ops that its order has before it and whose planned start comes soon:
    within the share `wait` of the picked op's own duration. It waits for such an op until that start, and then picks
    anew. With 0 no rank waits while an op is ready. With 1 none starts an op that would run into an earlier one as
    planned: so where costs and delays are as planned, and links decoupled, no op starts later than in the frozen run.
    (Schedulers of shared machines call it conservative backfilling, those of shops an active schedule.)

    Attributes:
        dispatch: which of the ready ops is picked.
        wait: a share of at least 0; 0 where dispatch is not hinted.

    Raises:
        ScheduleError: another dispatch or share.
    """

    dispatch: Dispatch
    wait: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.wait, Real) or isinstance(self.wait, bool) or not 0 <= self.wait < math.inf:
            raise ScheduleError(
                f"a wait of {self.wait!r}: give a share of an op's duration, at least 0, like 'hinted:0.5'",
                rule="dispatch",
            )
        if self.wait and self.dispatch is not Dispatch.HINTED:
            raise ScheduleError(
                f"dispatch '{self.dispatch}:{self.wait:g}': only a hinted rank, which follows its order as far as it "
                f"can, waits for what is nearly due there; give 'hinted:{self.wait:g}', or '{self.dispatch}'",
                rule="dispatch",
            )

    @classmethod
    def of(cls, value: Dispatch | Policy | str) -> Policy:
        """Reads a policy, a dispatch, or the text of one. Raises ScheduleError for anything else."""
        return value if isinstance(value, Policy) else cls.parse(str(value))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads `str(policy)`. Raises ScheduleError for anything else."""
        name, colon, share = text.partition(":")
        try:
            dispatch, wait = Dispatch(name), float(share) if colon else 0.0
        except ValueError:
            raise ScheduleError(
                f"dispatch {text!r}: give 'frozen', 'hinted' or 'dynamic', 'hinted:0.5' to wait, or 'auto'",
                rule="dispatch",
            ) from None
        return cls(dispatch, wait)

    def __str__(self) -> str:
        return f"{self.dispatch}:{self.wait:g}" if self.wait else str(self.dispatch)


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
