"""A planning problem of any stages: its queues as arrays for sequences of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from math import inf

import numpy as np

from penstock.cost import Costs, Links
from penstock.dispatch.queues import QueueGraph, queue_graph
from penstock.engine.compiled import compiled
from penstock.engine.needs import last_needed
from penstock.engine.network import Array, Irregularities, Network
from penstock.engine.sweep import Timer
from penstock.planning.graph import sequence as sequences
from penstock.planning.graph.sequence import Placed
from penstock.planning.options import Limits
from penstock.schedule import Placement, Schedule, ScheduleError, StageGraph

_CLASSES = {"W": 0, "I": 1, "B": 1, "F": 3}
"""What goes first where one microbatch runs alone: what gives memory back, and registered ops before forwards."""


@dataclass(frozen=True)
class GraphProblem:
    """A planning problem over queues in any number of rows, with windows of ops that unlock windows.

    Attributes:
        graph: its queues, and what makes a schedule of them.
        network, more: as arrays.
        takes, gives: per queue, what an op adds to what each of its rows holds at its start, and takes away at its
            end.
        cap: per row; without limit for streams.
    """

    graph: QueueGraph
    network: Network
    more: Irregularities
    takes: Array
    gives: Array
    cap: Array

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    def space(self) -> Placed:
        """Room for where the ops of a sequence are placed."""
        return Placed.of(self.network, self.takes, self.gives, self.cap)

    @cached_property
    def scale(self) -> float:
        """ms of an op in the mean."""
        return float(np.repeat(self.network.duration, self.network.size).mean())

    def needs(self, queue: int) -> list[tuple[int, float, int, int]]:
        """(queue, ms late, before, after) of all that a queue needs."""
        more = self.more
        return [
            (int(more.need_queue[n]), float(more.need_delay[n]), int(more.before[n]), int(more.after[n]))
            for n in range(more.need_first[queue], more.need_first[queue + 1])
        ]

    def placed(self, sequence: Array) -> tuple[float, Array]:
        """The makespan of a sequence of queue ids, -1 where it is none; and the start of each op."""
        space = self.space()
        made = compiled(sequences).placed(self.network, self.more, np.asarray(sequence, np.int64), space)
        return float(made), space.start

    def ops_of(self, sequence: Array) -> Array:
        """The number of the op at each place."""
        sequence = np.asarray(sequence, np.int64)
        by_queue = np.argsort(sequence, kind="stable")
        op = np.empty(len(sequence), np.int64)
        op[by_queue] = np.arange(len(sequence))
        return op

    def lined_up(self, rows: Sequence[Sequence[int]]) -> list[int] | None:
        """Rows as a sequence; None where they wait for one another."""
        network = self.network
        timed = Timer(network, self.more).time(list(chain(*rows)), np.ones(self.graph.num_queues))
        if not timed.complete:
            return None
        queue_of = np.repeat(np.arange(self.graph.num_queues), np.diff(network.op_first))
        found: list[int] = queue_of[np.argsort(timed.start, kind="stable")].tolist()
        return found

    def serial(self) -> list[int]:
        """One microbatch after the other: long, but there, and what needs least memory.

        Raises:
            ScheduleError: ops that wait for one another.
        """
        network, more, sizes = self.network, self.more, self.network.size.tolist()
        count = [0] * len(sizes)
        waiting = set(range(len(sizes)))
        ready: list[tuple[tuple[float, ...], int]] = []

        def look_at(q: int) -> None:
            """Lines up the queue's next op where all that it needs has run."""
            number = count[q]
            if q not in waiting or number == sizes[q]:
                return
            if all(last_needed(number, *group) < count[source] for source, _, *group in self.needs(q)):
                waiting.remove(q)
                pipeline, kind, stage = self.graph.labels[q]
                # Deeper forwards first, so that what is begun is brought to its end.
                deep = -stage if kind == "F" else stage
                heappush(ready, ((_CLASSES.get(kind, 2), number / sizes[q], pipeline, deep), q))

        for q in range(len(sizes)):
            look_at(q)
        order: list[int] = []
        while ready:
            _, q = heappop(ready)
            order.append(q)
            count[q] += 1
            waiting.add(q)
            for after in {q, *more.unlocks[more.unlock_first[q] : more.unlock_first[q + 1]].tolist()}:
                look_at(after)
        if len(order) < network.num_ops:
            _, kind, stage = next(
                label for label, ran, size in zip(self.graph.labels, count, sizes, strict=True) if ran < size
            )
            raise ScheduleError(
                f"what ops need goes in a circle: {kind} of stage {stage} waits for itself, by way of others "
                "(rule: dependencies); change `needs` of the stage graph",
                rule="dependencies",
            )
        return order

    def schedule(self, sequence: Array, name: str, max_in_flight: float | None) -> Schedule:
        """The schedule in which each rank runs its ops in the order of a sequence."""
        rows: list[list[int]] = [[] for _ in range(self.graph.num_rows)]
        for q in np.asarray(sequence).tolist():
            for row in self.graph.hosts(q):
                rows[row].append(q)
        return self.graph.schedule(name, rows, max_in_flight, self.placed(sequence)[1].tolist())


def pose_graph(
    costs: Costs,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    links: Links,
    limits: Limits,
    split: bool,
    stages: StageGraph | None = None,
    counted: bool = False,
    more_queues: Callable[[QueueGraph], QueueGraph] | None = None,
) -> GraphProblem:
    """Lays out the arrays.

    Args:
        split: whether backwards are I and W, else B.
        stages: how they depend on one another; a chain where not given.
        counted: whether limits count activations, else they are in the unit of the costs.
        more_queues: adds queues that stand in rows of their own.

    Raises:
        ScheduleError: asynchronous ops that hold memory.
    """
    if stages is not None:
        for registered in stages.registered:
            if registered.asynchronous and registered.holds:
                raise ScheduleError(
                    f"op kind {registered.kind} of stage {registered.stage} is asynchronous and holds "
                    f"{registered.holds:g} activations: plans of stage graphs take registered ops that hold memory "
                    "only where their ranks wait for them; build it with ps.Program",
                    rule="memory",
                )
    dealt = [m % placement.num_pipelines for m in range(num_microbatches)]
    graph = queue_graph(placement, num_ranks, dealt, costs, links, stages, split)
    if any(graph.tables.more.shift) or (graph.stage_graph and graph.stage_graph.some_of):
        raise ScheduleError(
            "ops that are passed on from microbatch to microbatch, or belong to one each, are not planned; build the "
            "schedule with ps.Program",
            rule="dependencies",
        )
    _check_needs(graph)
    if more_queues is not None:
        graph = more_queues(graph)
    listed, irregular = graph.network
    takes, gives = np.zeros((2, graph.num_queues))
    holds = graph.stage_graph.holds if graph.stage_graph is not None else {}
    for q, (_, kind, stage) in enumerate(graph.labels):
        held, share = limits.held[stage]
        back = {"I": share * held, "W": (1.0 - share) * held, "B": held}
        if kind == "F":
            takes[q] = held
        elif kind in back:
            gives[q] = back[kind]
        else:
            change = holds.get((kind, stage), 0.0) * held + (0.0 if counted else costs.memory_change(kind, stage))
            takes[q], gives[q] = max(change, 0.0), max(-change, 0.0)
    floats = ("duration", "delay", "tail")
    network = Network(
        **{
            name: np.asarray(value, np.float64 if name in floats else np.int64)
            for name, value in listed._asdict().items()
            if value is not None
        }
    )._replace(size=np.diff(np.asarray(listed.op_first, np.int64)))
    more = Irregularities(
        *(
            np.asarray(value, np.float64 if name == "need_delay" else np.int64)
            for name, value in zip(Irregularities._fields, irregular, strict=True)
        )
    )
    cap = np.full(graph.num_rows, inf)
    cap[: len(limits.cap)] = limits.cap
    return GraphProblem(graph, network, more, takes, gives, cap)


def _check_needs(graph: QueueGraph) -> None:
    """Raises ScheduleError where ops need more ops of a kind than there are."""
    network, more = graph.network
    size = np.diff(network.op_first).tolist()
    for q, (_, kind, stage) in enumerate(graph.labels):
        for n in range(more.need_first[q], more.need_first[q + 1]):
            source, before, after = more.need_queue[n], more.before[n], more.after[n]
            needed, there = -(-size[q] // after) * before, size[source]
            if needed > there:
                _, of_kind, at = graph.labels[source]
                raise ScheduleError(
                    f"{size[q]} ops of kind {kind} of stage {stage} need {needed} of kind {of_kind} of stage "
                    f"{at}, in groups of {after} and {before}, but there are {there}; change the groups or "
                    "the number of ops",
                    rule="dependencies",
                )
