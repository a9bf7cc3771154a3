"""A schedule lowered under one set of costs. Simulation, timing and passes that move ops read this form.

It says how long each op takes, which activations it adds to those that its rank holds, how many a rank holds at most
in its frozen order, and so how many a dynamic run may hold. `Memory` is for passes, which move ops under a limit.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from penstock.cost import Costs
from penstock.dispatch import Graph, lower
from penstock.engine.arrays import Array
from penstock.engine.memory import levels, levels_at_most, peaks
from penstock.engine.network import OpGraph
from penstock.engine.tolerance import EPSILON, is_within
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.async_ops import activations_added
from penstock.schedule.columns import KINDS, Columns, F, R
from penstock.schedule.op import OF_UPDATES
from penstock.schedule.updates import OWNER


@dataclass(frozen=True, eq=False)
class Order:
    """A schedule lowered under one set of costs.

    Attributes:
        schedule: the schedule.
        graph: the schedule, lowered.
        duration: of each op, ms.
        change: of each op, what it adds to the activations held.
    """

    schedule: Schedule
    graph: Graph
    duration: Array
    change: Array

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    @property
    def num_ranks(self) -> int:
        return self.graph.num_ranks

    @property
    def num_rows(self) -> int:
        """How many rows the engine runs: the ranks and, if ops are asynchronous, as many streams."""
        return self.graph.num_rows

    def ends(self, link: int) -> tuple[int, int]:
        """The two ranks of a link, which the engine numbers `source row * num_rows + target row`."""
        source, target = divmod(link, self.num_rows)
        return source % self.num_ranks, target % self.num_ranks

    @cached_property
    def peaks(self) -> list[float]:
        """Most activations each rank holds when it follows its frozen order."""
        return frozen_peaks(self.graph, self.change)

    @cached_property
    def crossing(self) -> tuple[Array, Array, Array]:
        """Edges between ranks, their source ops and their links (see `ends`)."""
        to, rank, source = self.graph.arrays.edge_to, self.graph.arrays.rank, self.graph.sources
        edges = np.flatnonzero((rank[source] - rank[to]) % self.num_ranks)
        return edges, source[edges], rank[source[edges]] * self.num_rows + rank[to[edges]]

    def late(self, delay: Array) -> Array | None:
        """How late the message of each edge is (ms). None if no link delays messages.

        Args:
            delay: ms of each link (see `ends`).
        """
        if not delay.any():
            return None
        rank = self.graph.arrays.rank
        before, after = rank[self.graph.sources], rank[self.graph.arrays.edge_to]
        return np.where(before == after, 0.0, delay[before * self.num_rows + after])

    def op_graph(self, delay: Array) -> OpGraph:
        """The ops as a network that times ranks which follow their orders. Links do nothing but delay messages.

        Args:
            delay: ms of each link (see `ends`).
        """
        graph, arrays = self.graph, self.graph.arrays
        together = graph.node_of if graph.has_shared_ops else None
        return OpGraph(arrays.first, arrays.rank, graph.sources, arrays.edge_to, self.late(delay), together)


def lowered(schedule: Schedule, costs: Costs) -> Order:
    """Lowers a schedule without communication ops.

    Raises:
        CostError: the costs are for another number of stages.
        ScheduleError: what `lower` refuses.
    """
    costs.require_stages(schedule.num_stages)
    graph = lower(schedule)
    change = np.array(memory_changes(graph, costs), np.float64)
    return Order(schedule, graph, durations(schedule, graph, costs), change)


def durations(schedule: Schedule, graph: Graph, costs: Costs) -> Array:
    """Of each op of a lowered schedule, ms."""
    columns = graph.columns
    if columns is not None:
        even = by_kind_and_stage(columns, costs.duration)
        return even if not costs.factors.time else even * by_op(columns, costs.time_factors)
    if costs.factors.time:
        found = [costs.duration(*op) for op in graph.ops]
    else:
        known = {key: costs.duration(*key) for key in {(op.kind, op.stage) for op in graph.ops}}
        found = [known[op[:2]] for op in graph.ops]
    for forward, backward in graph.backward_of.items():
        found[forward], found[backward] = costs.pair_duration(graph.ops[forward], graph.ops[backward]), 0.0
    for number, op in enumerate(graph.ops if schedule.updates is not None else ()):
        if op.kind in OF_UPDATES:
            found[number] = costs.duration(op.kind, op.stage, owns=schedule.pipeline_of(op) == OWNER)
    return np.array(found, np.float64)


def memory_changes(graph: Graph, costs: Costs) -> list[float]:
    """Per op number, what it adds to or takes from the activations its rank holds."""
    columns = graph.columns
    if columns is not None:
        changes = by_kind_and_stage(columns, costs.memory_change)
        if np.any(columns.kind == R):
            cell = columns.stage * (int(columns.microbatch.max()) + 1) + columns.microbatch
            again = (columns.kind == F) & np.isin(cell, cell[columns.kind == R])
            for stage in np.unique(columns.stage[again]).tolist():
                changes[again & (columns.stage == stage)] -= costs.memory_change("R", stage)
        if costs.factors.activation:
            changes *= by_op(columns, costs.activation_factors)
        found: list[float] = changes.tolist()
        return found
    recomputed = {(op.stage, op.microbatch) for op in graph.ops if op.kind == "R"}
    if costs.factors.activation:
        changes = [costs.memory_change(*op) for op in graph.ops]
    else:
        table = {key: costs.memory_change(*key) for key in {(op.kind, op.stage) for op in graph.ops}}
        changes = [table[op.kind, op.stage] for op in graph.ops]
    if graph.holds:
        counts = Counter(op[:2] for op in graph.ops)
        some = graph.some
        for number, op in enumerate(graph.ops):
            if share := graph.holds.get(op[:2], 0.0):
                # One a microbatch, and so of that microbatch; or said to be.
                alike = op[:2] in some or counts[op[:2]] == counts["F", op.stage]
                changes[number] += share * costs.memory_change("F", op.stage, op.microbatch if alike else None)
    if recomputed:
        for number, op in enumerate(graph.ops):
            if op.kind == "F" and (op.stage, op.microbatch) in recomputed:
                changes[number] -= costs.memory_change("R", op.stage, op.microbatch)
    return changes


def by_kind_and_stage(columns: Columns, value: Callable[[str, int], float]) -> Array:
    """Of each op what `value` says of its kind and stage; it is asked once of each pair that is there."""
    num_stages = int(columns.stage.max(initial=0)) + 1
    pair = columns.kind * num_stages + columns.stage
    table = np.zeros(len(KINDS) * num_stages)
    for each in np.flatnonzero(np.bincount(pair, minlength=len(table))).tolist():
        table[each] = value(KINDS[each // num_stages], each % num_stages)
    return table[pair]


def by_op(columns: Columns, factors: Callable[[str, int], Array]) -> Array:
    """Of each op its factor; `factors` says those of a kind, by stage and microbatch, of so many microbatches."""
    found = np.ones(columns.num_ops)
    num_microbatches = int(columns.microbatch.max(initial=0)) + 1
    for code in np.flatnonzero(np.bincount(columns.kind)).tolist():
        ops = columns.kind == code
        found[ops] = factors(KINDS[code], num_microbatches)[columns.stage[ops], columns.microbatch[ops]]
    return found


def frozen_peaks(graph: Graph, change: Sequence[float]) -> list[float]:
    """Most activations each rank holds when it follows its frozen order, however late what it does not wait for."""
    if not graph.has_streams:
        return peaks(change, graph.first[: graph.num_ranks + 1])
    awaited = [0] * graph.num_ops
    for rank in range(graph.num_ranks):
        stream = rank + graph.num_ranks
        for number, op in enumerate(range(graph.first[stream], graph.first[stream + 1]), start=1):
            for target in graph.edge_to[graph.edge_first[op] : graph.edge_first[op + 1]]:
                if graph.rank[target] == rank:
                    awaited[target] = max(awaited[target], number)
    most = []
    for rank in range(graph.num_ranks):
        order = _in_order(graph, rank)
        is_apart = [graph.rank[op] != rank for op in order]
        held, _ = levels_at_most([change[op] for op in order], is_apart, [awaited[op] for op in order])
        most.append(max(held, default=0.0))
    return most


def _in_order(graph: Graph, rank: int) -> list[int]:
    """The ops of a rank, those of its stream among the others."""
    rows = (range(graph.first[row], graph.first[row + 1]) for row in (rank, rank + graph.num_ranks))
    return sorted(itertools.chain(*rows), key=graph.place.__getitem__)


def order_peaks(graph: Graph, change: Sequence[float]) -> list[float]:
    """Most activations each rank holds when it follows its frozen order and waits for the end of every asynchronous
    op at its place: the least that a cap may be.
    """
    if not graph.has_streams:
        return frozen_peaks(graph, change)
    orders = [_in_order(graph, rank) for rank in range(graph.num_ranks)]
    first = list(itertools.accumulate(map(len, orders), initial=0))
    return peaks([change[op] for order in orders for op in order], first)


def frozen_caps(
    graph: Graph, change: Sequence[float], memory_limit: float | Sequence[float] | None = None
) -> list[float]:
    """The caps of a dynamic run: the frozen peaks, or what the user gave if the frozen order fits in it."""
    if memory_limit is None:
        return frozen_peaks(graph, change)
    own, caps = order_peaks(graph, change), given_caps(memory_limit, graph.num_ranks)
    for rank, (cap, peak) in enumerate(zip(caps, own, strict=True)):
        if not is_within(peak, cap):
            raise ScheduleError(
                f"rank {rank}: the cap is {cap:g} activations, but the schedule's own order needs {peak:g} "
                f"(rule: memory); raise memory_limit or build the schedule with fewer in flight",
                rule="memory",
                rank=rank,
            )
    return caps


def given_caps(memory_limit: float | Sequence[float], num_ranks: int) -> list[float]:
    """Reads the caps that a user gave, one for all ranks or one per rank. Raises ScheduleError for what are none."""
    given: Any = memory_limit
    try:
        if isinstance(given, str | Mapping):  # their letters or keys are no limits
            raise TypeError
        caps = [float(given)] * num_ranks if isinstance(given, Real) else list(map(float, given))
    except (TypeError, ValueError):
        raise ScheduleError(
            f"memory_limit is {memory_limit!r}: give a number of activations, or one per rank", rule="memory"
        ) from None
    if len(caps) != num_ranks:
        raise ScheduleError(
            f"memory_limit has {len(caps)} entries; give one per rank, {num_ranks} in all", rule="memory"
        )
    for rank, cap in enumerate(caps):
        if math.isnan(cap) or cap < 0:
            raise ScheduleError(
                f"memory_limit of rank {rank} is {cap}: give a number of at least 0", rule="memory", rank=rank
            )
    return caps


@dataclass(frozen=True)
class Memory:
    """What ops do to the activations a rank holds, and how many it may hold.

    Attributes:
        change: per op number, in the units of the costs: above 0 held from its start, below 0 freed at its end.
        count: per op number, the same in stage activations, as `check` counts them.
        caps: per rank, in the units of the costs; inf for no limit.
        max_count: most stage activations a rank may hold from F to B or W: the schedule's own limit, or inf.
    """

    change: list[float]
    count: list[float]
    caps: list[float]
    max_count: float

    def levels(self, graph: Graph, rank: int) -> list[float]:
        """What `rank` holds from the start of each op of its row (those that free: after their end)."""
        return levels(self.change, graph.first, rank)

    def room(self, rank: int) -> float:
        """The cap with a little slack for sums of floats."""
        return self.caps[rank] * (1 + EPSILON)


def memory_of(schedule: Schedule, graph: Graph, costs: Costs, memory_limit: float | Sequence[float] | None) -> Memory:
    """The memory of a schedule under a limit, and under its own.

    Args:
        memory_limit: in the units of the costs' activations, one for all ranks or one per rank; None for none.

    Raises:
        ScheduleError: limits of the wrong number, or below 0.
    """
    most = math.inf if schedule.max_in_flight is None else schedule.max_in_flight
    again = {(op.stage, op.microbatch) for op in graph.ops if op.kind == "R"}
    count = [activations_added(op, again, graph.holds) for op in graph.ops]
    caps = given_caps(math.inf if memory_limit is None else memory_limit, schedule.num_ranks)
    return Memory(memory_changes(graph, costs), count, caps, most)


def check_fits(schedule: Schedule, graph: Graph, memory: Memory, hint: str) -> None:
    """Raises ScheduleError where the schedule as it is holds more than it may."""
    for rank in range(graph.num_ranks):
        for step, level in enumerate(memory.levels(graph, rank)):
            if level > memory.room(rank):
                op = schedule.order[rank][step]
                raise ScheduleError(
                    f"rank {rank}, step {step}, {op.short()} of stage {op.stage}: the rank would hold {level:g}, the "
                    f"limit is {memory.caps[rank]:g} (rule: memory); {hint}",
                    rule="memory",
                    rank=rank,
                    step=step,
                    op=op,
                )
