"""A schedule as a network of times: when each op starts at the earliest, and at the latest.

An op starts once the ones before it in its row have ended and all that it needs is there. An op that several
ranks run together is one node with a place in each of their rows. The passes ask here what a change costs:
which op comes first does not depend on durations, so a network is made once and timed many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.cost import Costs, Links
from penstock.dispatch import Graph, lower
from penstock.engine.network import OpGraph
from penstock.engine.timing import Timer
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.async_ops import require_no_streams
from penstock.simulation.lowered import durations as durations_of


@dataclass(frozen=True)
class PassNetwork:
    """Nodes are op numbers of `graph`; an op of several ranks is the node of its first number.

    Attributes:
        graph: the schedule lowered.
        durations: per node (ms).
        node_of: op number -> node.
        order: the nodes, each after all it waits for.
        before, after: per node, (node, ms) of the dependencies: its message is that late.
        row_before, row_after: per node, its neighbours in the rows it stands in.
        ops: the same for the engine.
    """

    graph: Graph
    durations: list[float]
    node_of: list[int]
    order: list[int]
    before: list[list[tuple[int, float]]]
    after: list[list[tuple[int, float]]]
    row_before: list[list[int]]
    row_after: list[list[int]]
    ops: OpGraph

    @cached_property
    def _timer(self) -> Timer:
        return Timer(*self.ops.network())

    @cached_property
    def _turned(self) -> Timer:
        """Times the ops with time turned round: from its end everything starts as late as it can."""
        return Timer(*self.ops.turned().network())

    def ranks_of(self, node: int) -> list[int]:
        """The ranks that run the node's op."""
        graph = self.graph
        gang = graph.gang[node]
        if gang < 0:
            return [graph.rank[node]]
        return [graph.rank[o] for o in graph.gang_ops[graph.gang_first[gang] : graph.gang_first[gang + 1]]]

    def earliest(self, durations: Sequence[float]) -> tuple[list[float], float]:
        """The start of every node as soon as possible, and the makespan (ms)."""
        timed = self._timer.time(self.ops.row, np.array(durations))
        return list(timed.start), timed.makespan

    def latest(self, durations: Sequence[float], horizon: float) -> list[float]:
        """The latest start of every node with which all end by `horizon` (ms)."""
        taken = np.array(durations)
        before_end = self._turned.time(self.ops.turned().row, taken[::-1]).start
        latest: list[float] = (horizon - np.array(before_end)[::-1] - taken).tolist()
        return latest


def network(schedule: Schedule, costs: Costs, links: Links) -> PassNetwork:
    """The network of a schedule that `check` accepts.

    Raises:
        CostError: costs for another number of stages, or a link between ranks that are not there.
        ScheduleError: an op is missing, or the ranks wait for one another.
    """
    costs.require_stages(schedule.num_stages)
    links.check_ranks(schedule.num_ranks)
    require_no_streams(schedule, "this pass times what ranks run themselves")
    graph = lower(schedule)
    ranks = range(graph.num_ranks)
    node_of = [
        o if graph.gang[o] < 0 else graph.gang_ops[graph.gang_first[graph.gang[o]]] for o in range(graph.num_ops)
    ]
    rank, node = graph.arrays.rank, np.array(node_of, np.int64)
    source, target = graph.sources, graph.arrays.edge_to
    delays = np.array([[0.0 if a == b else links.delay(a, b) for b in ranks] for a in ranks])
    late = delays[rank[source], rank[target]]
    together = node if len(graph.gang_first) > 1 else None
    ops = OpGraph(graph.arrays.first, rank, source, target, late, together)
    before: list[list[tuple[int, float]]] = [[] for _ in node_of]
    after: list[list[tuple[int, float]]] = [[] for _ in node_of]
    row_before: list[list[int]] = [[] for _ in node_of]
    row_after: list[list[int]] = [[] for _ in node_of]
    for one, other, ms in zip(node[source].tolist(), node[target].tolist(), late.tolist(), strict=True):
        before[other].append((one, ms))
        after[one].append((other, ms))
    for r in ranks:
        for o in range(graph.first[r] + 1, graph.first[r + 1]):
            row_before[node_of[o]].append(node_of[o - 1])
            row_after[node_of[o - 1]].append(node_of[o])
    durations = durations_of(schedule, graph, costs).tolist()
    order = _order(schedule, ops, node_of)
    return PassNetwork(graph, durations, node_of, order, before, after, row_before, row_after, ops)


def _order(schedule: Schedule, ops: OpGraph, node_of: list[int]) -> list[int]:
    """The nodes in the order in which they start where each takes as long as any other."""
    timed = Timer(*ops.network(np.ones(len(node_of)))).time(ops.row)
    if not timed.complete:
        raise ScheduleError(
            f"the ranks of {schedule.name} wait for one another (rule: deadlock); ps.check(schedule) shows where",
            rule="deadlock",
        )
    start = list(timed.start)
    return sorted((o for o, node in enumerate(node_of) if o == node), key=start.__getitem__)
