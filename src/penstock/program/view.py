"""What a user's function sees when it is asked: the state of all ranks at that moment, and nothing it can change."""

from __future__ import annotations

from penstock.dispatch.queues import QueueGraph
from penstock.dispatch.tables import Tables
from penstock.schedule import Op


class View:
    """The moment of a decision.

    Attributes:
        rank: who decides.
        time: when (ms).
    """

    def __init__(self, graph: QueueGraph, tables: Tables, rank: int, time: float, rows: list[list[int]]) -> None:
        self.rank, self.time = rank, time
        self._graph, self._tables, self._rows = graph, tables, rows

    def started(self, kind: str, stage: int, pipeline: int = 0) -> int:
        """How many ops of a kind of a stage have started; 0 for a kind that is not there."""
        label = (pipeline, kind, stage)
        return self._tables.queues[self._graph.labels.index(label)].started if label in self._graph.labels else 0

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

    def has_run(self, op: Op) -> bool:
        """Whether an op has ended by now, wherever it runs (False for one that is not there)."""
        for q, (_, kind, stage) in enumerate(self._graph.labels):
            if (kind, stage) == (op.kind, op.stage):
                record = self._tables.queues[q]
                for index in range(record.started):
                    if self._graph.op(q, index) == op:
                        return all(
                            index < record.started - 1 or self._tables.ranks[r].free_at <= self.time
                            for r in self._graph.hosts(q)
                        )
        return False
