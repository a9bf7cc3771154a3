"""A timeline: when every op ran, on which rank, and what it waited for. Simulated and measured runs share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.schedule import Op, Schedule
from penstock.schedule.streams import with_launches


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op that ran.

    Attributes:
        rank, op: where and what.
        start, end: milliseconds from the first op's start.
        waited_for: the op whose message or result came last before this one, if this one had to wait for it.
        waited: milliseconds the rank stood idle before this op.
        blocked: milliseconds after `end` in which the rank could not go on because a link was full.
    """

    rank: int
    op: Op
    start: float
    end: float
    waited_for: Op | None = None
    waited: float = 0.0
    blocked: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """A message between ranks: from the end of `source` to its arrival for `target` (ms)."""

    source: Op
    target: Op
    source_rank: int
    target_rank: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class Timeline:
    """When every op ran.

    Attributes:
        schedule: the schedule that ran.
        ops: every op, by rank and then by start; the asynchronous ones of a rank after its others.
        messages: what travelled between ranks.
        peak_activations: most activations each rank held, in the units of the costs (activation units or bytes).
        source: "simulated" or "measured".
        dispatch: "frozen", "hinted" or "dynamic", or "hinted:0.5" where ranks waited; of "auto" what was chosen.
        considered: where dispatch was "auto", each policy that was tried, and its makespan (ms).
    """

    schedule: Schedule
    ops: Sequence[TimedOp]
    messages: Sequence[Message]
    peak_activations: tuple[float, ...]
    source: str = "simulated"
    dispatch: str = "frozen"
    considered: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:
        s = self.schedule
        return (
            f"<Timeline of {s.name}: {self.source}, {self.dispatch}, {s.num_ranks} ranks, {len(self.ops)} ops, "
            f"makespan {self.makespan:.10g} ms, bubble ratio {self.bubble_ratio:.1%}>"
        )

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @cached_property
    def makespan(self) -> float:
        """First op's start to last op's end, over all ranks (ms)."""
        if not self.ops:
            return 0.0
        return max(t.end for t in self.ops) - min(t.start for t in self.ops)

    @cached_property
    def span(self) -> float:
        """The largest, over ranks, of last end minus first start (ms): what zero-bubble claims are about."""
        spans = []
        for row in self.rows:
            if row:
                spans.append(max(t.end for t in row) - min(t.start for t in row))
        return max(spans, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Milliseconds each rank spends in ops; asynchronous ones cost it none."""
        return tuple(sum(t.end - t.start for t in row) for row in self.rows)

    @cached_property
    def bubble_ratio(self) -> float:
        """`1 - sum(busy) / (num_ranks * makespan)`."""
        if self.makespan == 0:
            return 0.0
        return 1 - sum(self.busy) / (self.num_ranks * self.makespan)

    @cached_property
    def rows(self) -> tuple[tuple[TimedOp, ...], ...]:
        """The ops that each rank ran itself, one after the other."""
        return self._split[0]

    @cached_property
    def streams(self) -> tuple[tuple[TimedOp, ...], ...]:
        """The asynchronous ops of each rank, which took their time beside the others."""
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[tuple[tuple[TimedOp, ...], ...], tuple[tuple[TimedOp, ...], ...]]:
        apart = self.schedule.asynchronous
        rows: list[list[TimedOp]] = [[] for _ in range(self.num_ranks)]
        streams: list[list[TimedOp]] = [[] for _ in range(self.num_ranks)]
        for timed in self.ops:
            (streams if timed.op[:2] in apart else rows)[timed.rank].append(timed)
        return tuple(map(tuple, rows)), tuple(map(tuple, streams))

    def executed(self) -> Schedule:
        """The schedule with each rank's ops in the order they ran; asynchronous ones where it came to them."""
        rows = tuple(tuple(t.op for t in row) for row in self.rows)
        return replace(self.schedule, order=with_launches(self.schedule, rows))
