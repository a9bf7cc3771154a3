"""What a user's function sees when it is asked: the state of all ranks at that moment, and nothing it can change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from penstock.dispatch.queues import QueueGraph
from penstock.engine.rule_tables import INFINITY, QueueRecord, Tables
from penstock.schedule import Op


class View:
    """The moment of a decision.

    Attributes:
        rank: who decides.
        time: when (ms).

    Examples:
        >>> import penstock as ps
        >>> def one_at_a_time(view, op):
        ...     return op.kind != "F" or view.in_flight() < 1
        >>> program = ps.Program(ps.placements.one_to_one(2), 2, ps.Rules(check=one_at_a_time))
        >>> print(program.build())
        schedule program: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 .  .  B0 F1 .  .  B1
        rank 1 | .  F0 B0 .  .  F1 B1
    """

    def __init__(
        self,
        graph: QueueGraph,
        tables: Tables,
        rank: int,
        time: float,
        rows: list[list[int]],
        start_time: Sequence[float],
        number: Mapping[tuple[int, str, int], int],
    ) -> None:
        self.rank, self.time = rank, time
        self._graph, self._tables, self._rows = graph, tables, rows
        self._start_time, self._number = start_time, number

    def started(self, kind: str, stage: int, pipeline: int = 0) -> int:
        """How many ops of a kind of a stage have started; 0 for a kind that is not there."""
        q = self._number.get((pipeline, kind, stage))
        return 0 if q is None else int(self._tables.queues[q].started)

    def in_flight(self, rank: int | None = None, stage: int | None = None) -> int:
        """Forwards on a rank (by default the one that decides), or of a stage, whose B or W has not started."""
        if stage is None:
            return int(self._tables.ranks[self.rank if rank is None else rank].in_flight)
        total = 0
        for (_, _, s), queue in zip(self._graph.labels, self._tables.queues, strict=True):
            if s == stage:
                total += int(queue.count) * queue.started
        return total

    def memory(self, rank: int | None = None) -> float:
        """What a rank holds, in the unit of the costs' activations."""
        return float(self._tables.ranks[self.rank if rank is None else rank].memory)

    def steps(self, rank: int | None = None) -> int:
        """How many ops a rank has started."""
        return len(self._rows[self.rank if rank is None else rank])

    def ran(self, rank: int | None = None) -> tuple[Op, ...]:
        """The ops a rank has started, in order."""
        seen: dict[int, int] = {}
        ops = []
        for q in self._rows[self.rank if rank is None else rank]:
            ops.append(self._graph.op(q, seen.get(q, 0)))
            seen[q] = seen.get(q, 0) + 1
        return tuple(ops)

    def upcoming(self, rank: int | None = None) -> tuple[Op, ...]:
        """The next op of each kind of each stage of a rank (in each pipeline), ready or not, where any is left."""
        t = self._tables
        record = t.ranks[self.rank if rank is None else rank]
        own = [(q, t.queues[q]) for q in t.own[record.own_first : record.own_last]]
        return tuple(self._graph.op(q, queue.started) for q, queue in own if queue.started < queue.length)

    def ready_since(self, op: Op) -> float:
        """When (ms) an upcoming op had all that it needs; infinite where that is not known yet, or for another op.

        An op that a limit held back counts from the moment when all it needs was there.
        """
        found = self._find(op)
        return found[0].ready_at if found is not None and found[1] == found[0].started else INFINITY

    def has_run(self, op: Op) -> bool:
        """Whether an op has ended by now, wherever it runs (False for one that is not there)."""
        found = self._find(op)
        if found is None or found[1] >= found[0].started:
            return False
        queue, index = found
        return self._start_time[queue.first_op + index] + queue.duration <= self.time

    def _find(self, op: Op) -> tuple[QueueRecord, int] | None:
        """An op's queue and its number there; None for one that is not there."""
        graph, index, pipeline = self._graph, op.microbatch, 0
        if graph.is_dealt(op.kind, op.stage):
            if not 0 <= index < len(graph.microbatch_pipeline):
                return None
            pipeline = graph.microbatch_pipeline[index]
            index = bisect_left(graph.microbatches[pipeline], index)
        q = self._number.get((pipeline, op.kind, op.stage))
        if q is None or not 0 <= index < self._tables.queues[q].length:
            return None
        return self._tables.queues[q], index
