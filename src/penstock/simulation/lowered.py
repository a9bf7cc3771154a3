"""A schedule lowered under one set of costs. Simulation, timing and passes that move ops read this form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.cost import Costs
from penstock.dispatch import Graph, lower
from penstock.engine.arrays import Array
from penstock.engine.network import OpGraph
from penstock.schedule import Schedule
from penstock.schedule.op import OF_UPDATES
from penstock.schedule.updates import OWNER
from penstock.simulation.memory import by_kind_and_stage, by_op, frozen_peaks, memory_changes


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
