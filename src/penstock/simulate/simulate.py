"""Times a schedule: the decision core driven over costs and links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from penstock.cost import CostError, Costs, LinkConditions, Links
from penstock.cost.conditions import Lines
from penstock.dispatch import Dispatch, Graph, lower
from penstock.dispatch.compiled import compiled
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.messages import remove_communication
from penstock.simulate import engine
from penstock.simulate.timeline import Message, TimedOp, Timeline

COMPILE_ABOVE = 50_000
"""Ops above which loading the compiled loop pays for itself (it takes about 0.6 s to load, once)."""


@dataclass(frozen=True)
class Decoupled:
    """Messages never hold up the rank that sends them."""


@dataclass(frozen=True)
class Blocking:
    """A link holds at most `depth` messages under way; its sender then stands still until one arrives.

    This is the head-of-line blocking of the PipeMorph paper, section 3.2: while a link is slow its queue
    fills, and the next send keeps later compute from starting although it is ready.

    Attributes:
        delegated: links, by their two ranks in either order, whose messages go through delegates: decoupled.
    """

    depth: int = 2
    delegated: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise CostError(f"a blocking link of depth {self.depth} can carry nothing: give at least 1")

    def depth_of(self, source: int, target: int) -> int:
        """How many messages a direction holds under way; 0 for any number."""
        return 0 if {(source, target), (target, source)} & self.delegated else self.depth


Transport = Decoupled | Blocking


def _transport(value: Transport | str) -> Transport:
    if isinstance(value, Decoupled | Blocking):
        return value
    if value == "decoupled":
        return Decoupled()
    if value == "blocking":
        return Blocking()
    raise CostError(f"transport {value!r}: give 'decoupled', 'blocking' or ps.Blocking(depth=2)")


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    links: Links | LinkConditions | Lines | None = None,
    dispatch: Dispatch | str = Dispatch.FROZEN,
    transport: Transport | str = "decoupled",
    max_held: float | Sequence[float] | None = None,
    warmup: Sequence[int] | None = None,
    links_at: float = 0.0,
) -> Timeline:
    """Runs `schedule` over `costs` and `links` and returns the timeline. Deterministic.

    Messages that are ops of the schedule are timed as all messages are: a rank waits for one where an op needs
    it, not where its receive is posted.

    Args:
        costs: per stage; by default F = I = W = 1 ms.
        links: delays in ms (pure latency), or conditions: latency, occupancy, bandwidth and loss that may change
            over time; by default none. `Lines` go on from what a run before left on them. Conditions run
            uncompiled: a million ops take some ten seconds.
        dispatch: "frozen", or "dynamic": a rank runs any ready op by priority B or I, then F, then W.
        transport: "decoupled", or `Blocking(depth)`.
        max_held: dynamic only: most activations a rank (or each rank) may hold, in the units of the costs.
            By default each rank is capped at its own peak in the frozen run without delays.
        warmup: dynamic only: forwards each rank runs before anything else.
        links_at: the moment (ms) of the conditions' own time at which the run starts.

    Raises:
        ScheduleError: the order deadlocks, or a cap is below what the frozen order itself needs.
        CostError: costs for another number of stages, or a link between ranks that are not there.
    """
    schedule = remove_communication(schedule)
    costs = costs or Costs.uniform(schedule.num_stages)
    links = links or Links()
    if costs.num_stages != schedule.num_stages:
        raise CostError(f"the costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
    (links.conditions if isinstance(links, Lines) else links).check_ranks(schedule.num_ranks)
    mode = as_dispatch(dispatch)
    graph = lower(schedule)
    change = memory_changes(graph, costs)
    caps = [math.inf] * graph.num_ranks
    if warmup is not None and len(warmup) != graph.num_ranks:
        raise ScheduleError(
            f"warmup has {len(warmup)} counts, one a rank is needed: {graph.num_ranks}", rule="options"
        )
    if mode is Dispatch.DYNAMIC:
        caps = frozen_caps(graph, change, max_held)
    return _run(schedule, graph, costs, links, mode, _transport(transport), change, caps, warmup, links_at)


def as_dispatch(value: Dispatch | str) -> Dispatch:
    """Reads "frozen" or "dynamic"; raises ScheduleError for anything else."""
    try:
        return Dispatch(value)
    except ValueError:
        raise ScheduleError(f"dispatch {value!r}: give 'frozen' or 'dynamic'", rule="dispatch") from None


def memory_changes(graph: Graph, costs: Costs) -> list[float]:
    """Per op number, what it adds to or takes from the activations its rank holds."""
    again = {(op.stage, op.microbatch) for op in graph.ops if op.kind == "R"}
    table = {key: costs.memory_change(*key) for key in {(op.kind, op.stage) for op in graph.ops}}
    changes = [table[op.kind, op.stage] for op in graph.ops]
    if again:
        for number, op in enumerate(graph.ops):
            if op.kind == "F" and (op.stage, op.microbatch) in again:
                changes[number] -= costs.memory_change("R", op.stage)
    return changes


def frozen_peaks(graph: Graph, change: Sequence[float]) -> list[float]:
    """Most activations each rank holds when it follows its frozen order; timing has no part in it."""
    peaks = []
    for rank in range(graph.num_ranks):
        held = peak = 0.0
        for op in range(graph.first[rank], graph.first[rank + 1]):
            held += change[op]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def frozen_caps(
    graph: Graph, change: Sequence[float], max_held: float | Sequence[float] | None = None
) -> list[float]:
    """The caps of a dynamic run: the frozen peaks, or what the user gave if the frozen order fits in it."""
    peaks = frozen_peaks(graph, change)
    if max_held is None:
        return peaks
    caps = [float(max_held)] * graph.num_ranks if isinstance(max_held, int | float) else list(map(float, max_held))
    if len(caps) != graph.num_ranks:
        raise ScheduleError(
            f"max_held has {len(caps)} entries, one a rank is needed: {graph.num_ranks}", rule="memory"
        )
    for rank, (cap, peak) in enumerate(zip(caps, peaks, strict=True)):
        if math.isnan(cap) or cap < peak * (1 - 1e-9):
            raise ScheduleError(
                f"rank {rank}: the cap is {cap:g} activations, but the schedule's own order needs {peak:g} "
                f"(rule: memory); raise max_held or build the schedule with fewer in flight",
                rule="memory",
                rank=rank,
            )
    return caps


def _run(
    schedule: Schedule,
    graph: Graph,
    costs: Costs,
    links: Links | LinkConditions | Lines,
    mode: Dispatch,
    transport: Transport,
    change: list[float],
    caps: list[float],
    warmup: Sequence[int] | None,
    links_at: float,
) -> Timeline:
    ranks = range(graph.num_ranks)
    duration = {key: costs.duration(*key) for key in {(op.kind, op.stage) for op in graph.ops}}
    num_ops = graph.num_ops
    ints: dict[str, list[int]] = {
        "rank_of": graph.rank,
        "first": graph.first,
        "missing": list(graph.num_needed),
        "edge_first": graph.edge_first,
        "edge_to": graph.edge_to,
        "queue_rank_first": graph.queue_rank_first,
        "queue_first": graph.queue_first,
        "queue_ops": graph.queue_ops,
        "queue_of": graph.queue_of,
        "priority": graph.priority,
        "head": list(graph.queue_first[:-1]),
        "next_frozen": list(graph.first[:-1]),
        "done": [0] * num_ops,
        "state": [0] * graph.num_ranks,
        "in_transit": [0] * graph.num_ranks**2,
        "unsent": [0] * graph.num_ranks,
        "turn": [0] * num_ops,
        "gang": graph.gang,
        "gang_first": graph.gang_first,
        "gang_ops": graph.gang_ops,
        "gathered": [0] * max(1, len(graph.gang_first) - 1),
        "warmup_left": list(warmup) if warmup is not None else [0] * graph.num_ranks,
        "depth": [transport.depth_of(a, b) for a in ranks for b in ranks] if isinstance(transport, Blocking) else [0],
    }
    floats: dict[str, list[float]] = {
        "duration": [duration[op.kind, op.stage] for op in graph.ops],
        "memory_change": change,
        "delay": [links.delay(a, b) if a != b else 0.0 for a in ranks for b in ranks]
        if isinstance(links, Links)
        else [0.0],
        "cap": caps,
        "held": [0.0] * graph.num_ranks,
        "start_time": [0.0] * num_ops,
        "end_time": [0.0] * num_ops,
        "arrival_time": [0.0] * len(graph.edge_to),
        "free_time": [0.0] * num_ops,
        "peak": [0.0] * graph.num_ranks,
    }
    arrays: dict[str, Any] = {**ints, **floats}
    loop: ModuleType = engine
    arrival = None if isinstance(links, Links) else _passage(graph, costs, links, links_at)
    if num_ops > COMPILE_ABOVE and arrival is None:
        import numpy as np

        arrays = {n: np.asarray(a, np.int64) for n, a in ints.items()}
        arrays |= {n: np.asarray(a, np.float64) for n, a in floats.items()}
        loop = compiled(engine)
    bounded = isinstance(transport, Blocking)
    ended = loop.run(mode is Dispatch.DYNAMIC, bounded=bounded, arrival=arrival, **arrays)
    if ended < num_ops:
        stuck = next(o for o in range(num_ops) if not arrays["done"][o])
        raise ScheduleError(
            f"the run stops after {ended} of {num_ops} ops: rank {graph.rank[stuck]} never runs {graph.ops[stuck]} "
            f"(rule: deadlock); ps.check(schedule) shows why",
            rule="deadlock",
            rank=graph.rank[stuck],
            op=graph.ops[stuck],
        )
    return _timeline(schedule, graph, mode, arrays)


def _passage(graph: Graph, costs: Costs, links: LinkConditions | Lines, at: float) -> Callable[[int, float], float]:
    """When the message of an edge, sent at some time, arrives."""
    lines = links if isinstance(links, Lines) else Lines(links)
    sources = [op for op in range(graph.num_ops) for _ in range(graph.edge_first[op + 1] - graph.edge_first[op])]

    def arrival(edge: int, now: float) -> float:
        source, target = sources[edge], graph.edge_to[edge]
        size = costs.message_size(graph.ops[source][:2], graph.ops[target][:2])
        sent = now + at
        # Rounded, or what a sum leaves over would part what happens at one moment, and turn ties.
        return now + round(lines.arrival(graph.rank[source], graph.rank[target], size, sent) - sent, 9)

    return arrival


def _timeline(schedule: Schedule, graph: Graph, mode: Dispatch, arrays: dict[str, Any]) -> Timeline:
    starts, ends = list(map(float, arrays["start_time"])), list(map(float, arrays["end_time"]))
    free, arrivals = list(map(float, arrays["free_time"])), list(map(float, arrays["arrival_time"]))
    turns = list(map(int, arrays["turn"]))
    latest: list[tuple[float, int]] = [(-1.0, -1)] * graph.num_ops
    messages = []
    for source in range(graph.num_ops):
        for edge in range(graph.edge_first[source], graph.edge_first[source + 1]):
            target = graph.edge_to[edge]
            latest[target] = max(latest[target], (arrivals[edge], source))
            if graph.rank[source] != graph.rank[target]:
                messages.append(
                    Message(
                        graph.ops[source],
                        graph.ops[target],
                        graph.rank[source],
                        graph.rank[target],
                        ends[source],
                        arrivals[edge],
                    )
                )
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
    return Timeline(schedule, tuple(ops), tuple(messages), tuple(map(float, arrays["peak"])), "simulated", mode.value)
