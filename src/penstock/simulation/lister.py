"""Makes or times the rows of a queue graph, compiled where that pays.

lister = Lister(graph)                 # buffers and compiled code, to be used many times
listed = lister.list_by_rules(tables)  # tables: the graph's, with rules filled in
listed.makespan, listed.schedule("mine")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from types import ModuleType
from typing import Any

from penstock.dispatch.queues import QueueGraph
from penstock.engine import list_by_rules
from penstock.engine.arrays import prepared
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.rule_tables import Tables, new_state
from penstock.engine.sweep import Timer
from penstock.schedule import Schedule
from penstock.schedule.async_ops import rows_of as rows_of_ops


@dataclass(frozen=True)
class ListedRun:
    """Rows and times of a run.

    Attributes:
        reached: how many places of each row have run: fewer than there are where the ranks got stuck.
        makespan: first op's start to last op's end (ms); infinite where the ranks got stuck.
    """

    graph: QueueGraph
    rows: Any
    row_first: Sequence[int]
    start_time: Any
    reached: Sequence[int]
    makespan: float

    @property
    def complete(self) -> bool:
        """Whether every op has run."""
        return sum(self.reached) == self.row_first[-1]

    def copy_rows(self) -> list[list[int]]:
        """Each rank's queue numbers in order, up to where it got; then those of streams, where there are any."""
        begins = self.row_first[:-1]
        return [[int(q) for q in self.rows[a : a + done]] for a, done in zip(begins, self.reached, strict=True)]

    def schedule(self, name: str, max_in_flight: float | None = None) -> Schedule:
        """The schedule that was made."""
        return self.graph.schedule(name, self.copy_rows(), max_in_flight, self.start_time)


class Lister:
    """Runs one queue graph, many times.

    Args:
        compile: whether to run as C; by default where that can be had.
    """

    def __init__(self, graph: QueueGraph, compile: bool | None = None) -> None:
        self.graph = graph
        self._as_c = is_compiled() if compile is None else compile
        self._loop: ModuleType = compiled(list_by_rules) if self._as_c else list_by_rules
        network, more = graph.network
        self._network, self._more = prepared(network, self._as_c), prepared(more, self._as_c)

    @cached_property
    def _timer(self) -> Timer:
        return Timer(*self.graph.network, self._as_c)

    def list_by_rules(self, tables: Tables) -> ListedRun:
        """Makes rows by the rules in `tables`, which are those of the graph with other rules."""
        state = new_state(tables, self._as_c)
        self._loop.run(
            Tables(
                self._network,
                self._more,
                prepared(tables.queues, self._as_c),
                prepared(tables.ranks, self._as_c),
                prepared(tables.slots, self._as_c),
            ),
            state,
        )
        reached, row_first = list(map(int, state.filled)), tables.network.row_first
        makespan = float(max(state.free_at)) if sum(reached) == row_first[-1] else inf
        return ListedRun(self.graph, state.rows, row_first, state.start_time, reached, makespan)

    def time_rows(self, rows: Any) -> ListedRun:
        """Times rows laid out rank by rank, or one list per rank."""
        if isinstance(rows, list) and rows and isinstance(rows[0], list):
            rows = [q for row in rows for q in row]
        timed = self._timer.time(rows)
        makespan = timed.makespan if timed.complete else inf
        return ListedRun(self.graph, rows, self.graph.network[0].row_first, timed.start, timed.reached, makespan)


def rows_of(graph: QueueGraph, schedule: Schedule) -> list[list[int]]:
    """A schedule's rows as queue numbers; its ops must be those of the graph, each queue's in microbatch order.

    Raises ValueError for a schedule that is not of this graph.
    """
    number = {label: q for q, label in enumerate(graph.labels)}
    seen: dict[tuple[int, int], int] = {}
    rows = []
    for rank, row in enumerate(rows_of_ops(schedule)):
        numbers = []
        for op in row:
            pipeline = schedule.microbatch_pipeline[op.microbatch] if len(graph.microbatches) > 1 else 0
            q = number.get((pipeline, op.kind, op.stage))
            if q is None or graph.op(q, seen.get((rank, q), 0)) != op:
                raise ValueError(f"rank {rank}: {op} is not the next op of its queue in microbatch order")
            seen[rank, q] = seen.get((rank, q), 0) + 1
            numbers.append(q)
        rows.append(numbers)
    return rows
