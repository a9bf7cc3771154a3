"""A timeline: when every op ran, on which rank, and what it waited for. Simulated and measured runs both have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cost import CostError
from penstock.schedule import Op, Schedule, picture
from penstock.schedule.async_ops import in_executed_order
from penstock.simulation.runner import RunResult


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op that ran.

    Attributes:
        rank, op: the rank, and the op that it ran.
        start, end: milliseconds since the start of the first op.
        waited_for: the op whose message or result came last before this op, if this op had to wait for it.
        waited: milliseconds that the rank was idle before this op.
        blocked: milliseconds after `end` in which the rank could not continue because a link was full.

    Examples:
        >>> import penstock as ps
        >>> t = ps.simulate(ps.build("gpipe", 2, 2))
        >>> second = [each for each in t.ops if each.rank == 1][0]
        >>> str(second.op), second.start, second.end, str(second.waited_for), second.waited
        ('1F0', 1.0, 2.0, '0F0', 1.0)
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
    """A message between two ranks, from the end of `source` to the start of `target`.

    Attributes:
        source: the op that made it.
        target: the op that needs it.
        source_rank: the rank that sends.
        target_rank: the rank that receives.
        sent: when it was sent, or its send was posted (ms).
        left: when its data left (ms). Only over `channels` may this be later than `sent`.
        arrived, taken: when it arrived, and when `target` started (ms). A measured run only knows the latter.
        posted: when its receive was posted (ms), in a run over `channels`, else None.

    Examples:
        >>> import penstock as ps
        >>> t = ps.simulate(ps.build("gpipe", 2, 2), links=ps.Links({(0, 1): 5.0}))
        >>> first = min(t.messages, key=lambda each: each.sent)
        >>> str(first.source), str(first.target), first.sent, first.arrived, first.taken
        ('0F0', '1F0', 1.0, 6.0, 6.0)
    """

    source: Op
    target: Op
    source_rank: int
    target_rank: int
    sent: float
    left: float
    arrived: float
    taken: float
    posted: float | None = None


@dataclass(frozen=True)
class Timeline:
    """When every op of a schedule ran.

    Attributes:
        schedule: the schedule that ran.
        ops: every op, by rank and then by start. The asynchronous ops of a rank come after its others.
        messages: the messages between ranks.
        peak_activations: most activations that each rank held, in the unit of the costs (activation units or bytes).
        source: "simulated" or "measured".
        dispatch: "frozen", "hinted" or "dynamic"; "hinted:0.5" if ranks waited. For "auto": what was chosen.
        considered: for "auto", each policy that was tried, with its makespan (ms).
        channels: what carried the messages, see `schedule.messages`, if they were ops that ranks posted; else None.

    Examples:
        >>> import penstock as ps
        >>> t = ps.simulate(ps.build("1f1b", 2, 3), ps.Costs.uniform(2, f=10, i=10, w=10))
        >>> t.makespan, t.bubble_ratio, t.peak_activations
        (120.0, 0.25, (2.0, 1.0))
        >>> op = t.rows[0][2]
        >>> print(op.op, op.start, op.waited, op.waited_for)
        0B0 40.0 20.0 1B0
    """

    schedule: Schedule
    ops: Sequence[TimedOp]
    messages: Sequence[Message]
    peak_activations: tuple[float, ...]
    source: str = "simulated"
    dispatch: str = "frozen"
    considered: tuple[tuple[str, float], ...] = ()
    channels: str | None = None

    def __repr__(self) -> str:
        s = self.schedule
        return (
            f"<Timeline of {s.name}: {self.source}, {self.dispatch}, {s.num_ranks} ranks, {self.num_ops} ops, "
            f"makespan {self.makespan:.10g} ms, bubble ratio {self.bubble_ratio:.1%}>"
        )

    def save(self, path: str | Path) -> None:
        """Writes a picture (.svg, .html, .txt) or a trace (.json, .json.gz), depending on the ending.

        Raises:
            ScheduleError: another ending, or a folder that does not exist.
        """
        picture.save(self, path)

    def _repr_html_(self) -> str:
        return picture.shown(self, self.num_ops)

    def __getattr__(self, name: str) -> Any:
        """Makes the ops and messages of a run: they are created when somebody first asks for them."""
        ran, make = vars(self).get("ran"), {"ops": _ops, "messages": _messages}.get(name)
        if ran is None or make is None:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)
        return vars(self).setdefault(name, make(ran))

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def num_ops(self) -> int:
        """How many ops ran."""
        ran: RunResult | None = vars(self).get("ran")
        return len(self.ops) if ran is None else ran.order.num_ops

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @cached_property
    def makespan(self) -> float:
        """Milliseconds from the start of the first op to the end of the last op, over all ranks."""
        if not self.ops:
            return 0.0
        return max(t.end for t in self.ops) - min(t.start for t in self.ops)

    @cached_property
    def span(self) -> float:
        """The longest time from a rank's first start to its last end (ms). Zero-bubble papers minimize this."""
        spans = []
        for row in self.rows:
            if row:
                spans.append(max(t.end for t in row) - min(t.start for t in row))
        return max(spans, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Milliseconds that each rank spends in ops. Asynchronous ops do not count."""
        return tuple(sum(t.end - t.start for t in row) for row in self.rows)

    @cached_property
    def bubble_ratio(self) -> float:
        """`1 - sum(busy) / (num_ranks * makespan)`."""
        if self.makespan == 0:
            return 0.0
        return 1 - sum(self.busy) / (self.num_ranks * self.makespan)

    @cached_property
    def rows(self) -> tuple[tuple[TimedOp, ...], ...]:
        """The ops that each rank ran itself, one after another."""
        return self._split[0]

    @cached_property
    def streams(self) -> tuple[tuple[TimedOp, ...], ...]:
        """The asynchronous ops of each rank, which ran beside the others."""
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
        """The schedule with each rank's ops in the order in which they ran.

        Asynchronous ops stand where the rank came to them. Where a dynamic run had more in flight than the schedule's
        own `max_in_flight`, the schedule returned has none: such a run keeps to memory in the unit of its costs.
        """
        rows = tuple(tuple(t.op for t in row) for row in self.rows)
        return in_executed_order(self.schedule, rows)


def timeline_of(ran: RunResult, dispatch: str, considered: tuple[tuple[str, float], ...] = ()) -> Timeline:
    """Makes a timeline of a run. Its ops and messages are made when they are asked for.

    Raises:
        CostError: times are too large for a float.
    """
    graph, starts, ends = ran.order.graph, np.asarray(ran.start_time, float), np.asarray(ran.end_time, float)
    if not np.isfinite(ends).all():
        raise CostError("the run would take more milliseconds than a float can hold; give smaller costs and delays")
    made = object.__new__(Timeline)
    said = Timeline(ran.order.schedule, (), (), ran.peaks, "simulated", dispatch, considered)
    vars(made).update({name: value for name, value in vars(said).items() if name not in ("ops", "messages")}, ran=ran)
    if graph.num_ops:
        vars(made)["makespan"] = float(ends.max() - starts.min())
    turn, first = np.asarray(ran.turn), graph.arrays.first
    spans, busy = [], []
    for begin, end in zip(first[: graph.num_ranks].tolist(), first[1 : graph.num_ranks + 1].tolist(), strict=True):
        order = begin + np.argsort(turn[begin:end], kind="stable")
        # As the rows say it, whose sums go op by op.
        busy.append(sum((ends[order] - starts[order]).tolist()))
        if end > begin:
            spans.append(float(ends[begin:end].max() - starts[begin:end].min()))
    vars(made)["busy"], vars(made)["span"] = tuple(busy), max(spans, default=0.0)
    return made


def _messages(ran: RunResult) -> tuple[Message, ...]:
    graph, (edges, sources, _) = ran.order.graph, ran.order.crossing
    return tuple(
        Message(
            graph.ops[source],
            graph.receives(source, target := graph.edge_to[edge]),
            graph.host(source),
            graph.host(target),
            sent := float(ran.end_time[source]),
            sent,
            float(ran.arrival_time[edge]),
            float(ran.start_time[target]),
        )
        for edge, source in zip(edges.tolist(), sources.tolist(), strict=True)
    )


def _ops(ran: RunResult) -> tuple[TimedOp, ...]:
    graph, turns = ran.order.graph, list(map(int, ran.turn))
    starts, ends, free, arrivals = (
        list(map(float, times)) for times in (ran.start_time, ran.end_time, ran.free_time, ran.arrival_time)
    )
    latest: list[tuple[float, int]] = [(-1.0, -1)] * graph.num_ops
    for source in range(graph.num_ops):
        for edge in range(graph.edge_first[source], graph.edge_first[source + 1]):
            target = graph.edge_to[edge]
            latest[target] = max(latest[target], (arrivals[edge], source))
    ops: list[TimedOp] = []
    for rank in range(graph.num_ranks):
        previous = 0.0
        for o in sorted(range(graph.first[rank], graph.first[rank + 1]), key=turns.__getitem__):
            waited = starts[o] - previous
            cause: Op | None = None
            if waited > 0 and latest[o][1] >= 0 and latest[o][0] > previous:
                cause = graph.ops[latest[o][1]]
            ops.append(TimedOp(rank, graph.ops[o], starts[o], ends[o], cause, max(waited, 0.0), free[o] - ends[o]))
            previous = free[o]
        if graph.has_streams:
            stream = graph.num_ranks + rank
            apart = range(graph.first[stream], graph.first[stream + 1])
            ops += [TimedOp(rank, graph.ops[o], starts[o], ends[o]) for o in sorted(apart, key=starts.__getitem__)]
    return tuple(ops)
