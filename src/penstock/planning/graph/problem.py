"""A planning problem of any stages: its queues as arrays for sequences of ops, and as the flow of one turn.

A turn is one microbatch of each pipeline, so that two pipelines that run against each other share a turn. Where
stages have microbatches of different sizes, or groups of ops unlock groups, a turn is the smallest part of the run
that has whole groups alone: of stages with 8 and with 4 microbatches, two of the one and one of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import gcd, inf
from typing import Any

import numpy as np

from penstock.cost import Costs, Links
from penstock.dispatch.queues import QueueGraph, queue_graph
from penstock.engine.compiled import compiled
from penstock.engine.needs import last_needed
from penstock.engine.network import Array, Irregularities, Network
from penstock.engine.timing import Timer
from penstock.planning.graph import sequence as sequences
from penstock.planning.graph.flow import Block, BlockDependency, Flow
from penstock.planning.options import Limits
from penstock.schedule import Placement, Schedule, ScheduleError, StageGraph

_CLASSES = {"W": 0, "I": 1, "B": 1, "F": 3}
"""What goes first where one turn runs alone: what gives memory back, and registered ops before forwards."""


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

    @cached_property
    def scale(self) -> float:
        """ms of an op in the mean."""
        return float(np.repeat(self.network.duration, self.network.size).mean())

    def described(self) -> str:
        """The problem in words, all its numbers given, for a report."""
        return (
            f"{self.flow.flow!r} run {list(self.flow.counts)} times, caps {self.cap.tolist()}, placement "
            f"{self.graph.placement!r}, stages {self.graph.stage_graph!r}"
        )

    def needs(self, queue: int) -> list[tuple[int, float, int, int]]:
        """(queue, ms late, before, after) of all that a queue needs."""
        more = self.more
        return [
            (int(more.need_queue[n]), float(more.need_delay[n]), int(more.before[n]), int(more.after[n]))
            for n in range(more.need_first[queue], more.need_first[queue + 1])
        ]

    def placed(self, sequence: Array) -> tuple[float, Array]:
        """The makespan of a sequence of queue ids, -1 where it is none; and the start of each op."""
        n, num_rows = self.num_ops, len(self.cap)
        start, ints = np.empty(n), np.empty((4, n), np.int64)
        module: Any = compiled(sequences)
        made = module.placed(
            self.network, self.more, self.takes, self.gives, self.cap, np.asarray(sequence, np.int64), start, *ints,
            np.empty(self.graph.num_queues, np.int64), np.empty(num_rows + 1, np.int64), np.empty(num_rows),
            np.empty(num_rows),
        )  # fmt: skip
        return float(made), start

    def sorted_by_start(self, sequence: Array, start: Array) -> Array:
        """The same rows as a sequence in which ops start one after the other."""
        return np.asarray(sequence)[np.argsort(self._of_places(sequence, start), kind="stable")]

    def _of_places(self, sequence: Array, per_op: Array) -> Array:
        """What each place of a sequence has of what each op has."""
        return per_op[self.ops_of(sequence)]

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
        """One turn after the other: long, but there, and what needs least memory."""
        flow = self.flow
        return [
            flow.queue[b] for turn in range(max(flow.counts)) for b, count in enumerate(flow.counts) if turn < count
        ]

    def schedule(self, sequence: Array, name: str, max_in_flight: float | None) -> Schedule:
        """The schedule in which each rank runs its ops in the order of a sequence."""
        rows: list[list[int]] = [[] for _ in range(self.graph.num_rows)]
        for q in np.asarray(sequence).tolist():
            for row in self.graph.hosts(q):
                rows[row].append(q)
        return self.graph.schedule(name, rows, max_in_flight, self.placed(sequence)[1].tolist())

    @cached_property
    def flow(self) -> TurnFlow:
        """The same as turns."""
        size = [int(n) for n in self.network.size]
        copies, counts = _turns(size, [self.needs(q) for q in range(len(size))])
        first = list(accumulate(copies, initial=0))
        blocks: list[tuple[int, int, list[tuple[int, float]]]] = []
        for q, num in enumerate(copies):
            for copy in range(num):
                needs = [
                    (first[source] + last_needed(copy, before, after), delay)
                    for source, delay, before, after in self.needs(q)
                ]
                if copy > 0:
                    needs.append((first[q] + copy - 1, 0.0))
                blocks.append((q, copy, needs))
        order = self._lined_up_turn(blocks)
        place = {b: k for k, b in enumerate(order)}
        made, queue, copy_of = [], [], []
        for b in order:
            q, copy, needs = blocks[b]
            pipeline, kind, stage = self.graph.labels[q]
            name = f"{stage}{kind}" + (f".{copy}" if copies[q] > 1 else "")
            name += f" of pipeline {pipeline}" if len(self.graph.microbatches) > 1 else ""
            least = tuple(BlockDependency(place[source], delay) for source, delay in needs)
            duration, takes, gives = (float(each[q]) for each in (self.network.duration, self.takes, self.gives))
            made.append(Block(name, tuple(self.graph.hosts(q)), duration, least, takes, gives))
            queue.append(q)
            copy_of.append(copy)
        per_turn = tuple(copies[q] for q in queue)
        turns = tuple(counts[q] for q in queue)
        return TurnFlow(Flow(tuple(made)), tuple(queue), tuple(copy_of), per_turn, turns)

    def _lined_up_turn(self, blocks: Sequence[tuple[int, int, list[tuple[int, float]]]]) -> list[int]:
        """The blocks of one turn, each behind all it needs, what gives memory back as early as can be."""
        missing = [len(needs) for _, _, needs in blocks]
        unlocks: list[list[int]] = [[] for _ in blocks]
        for b, (_, _, needs) in enumerate(blocks):
            for source, _ in needs:
                unlocks[source].append(b)

        def place(b: int) -> tuple[int, int, int, int]:
            q, copy, _ = blocks[b]
            pipeline, kind, stage = self.graph.labels[q]
            # Deeper forwards first, so that what is begun is brought to its end.
            return _CLASSES.get(kind, 2), pipeline, -stage if kind == "F" else stage, copy

        ready_now = [b for b, count in enumerate(missing) if count == 0]
        order: list[int] = []
        while ready_now:
            b = min(ready_now, key=place)
            ready_now.remove(b)
            order.append(b)
            for after in unlocks[b]:
                missing[after] -= 1
                if missing[after] == 0:
                    ready_now.append(after)
        if len(order) < len(blocks):
            waiting = [self.graph.labels[blocks[b][0]] for b in range(len(blocks)) if b not in set(order)]
            _, kind, stage = waiting[0]
            raise ScheduleError(
                f"what ops need goes in a circle: {kind} of stage {stage} waits for itself, by way of others "
                "(rule: dependencies); change `needs` of the stage graph",
                rule="dependencies",
            )
        return order


@dataclass(frozen=True)
class TurnFlow:
    """A flow and what its blocks stand for.

    Attributes:
        flow: the blocks of one turn.
        queue, copy: of each block: it is op `turn * per_turn + copy` of its queue.
        per_turn: of each block, ops of its queue in a turn.
        counts: turns that each block takes part in.
    """

    flow: Flow
    queue: tuple[int, ...]
    copy: tuple[int, ...]
    per_turn: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all blocks that depend on one another take part in the same turns, as bounds on flows assume."""
        return all(
            self.counts[need.block] == count
            for block, count in zip(self.flow.blocks, self.counts, strict=True)
            for need in block.needs
        )


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
    if any(need.shift for need in graph.tables.needs) or (graph.stage_graph and graph.stage_graph.some_of):
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
    queues, needs = graph.tables.queues, graph.tables.needs
    for record, (_, kind, stage) in zip(queues, graph.labels, strict=True):
        for need in needs[record.need_first : record.need_last]:
            needed, there = -(-record.length // need.after) * need.before, queues[need.queue].length
            if needed > there:
                _, of_kind, at = graph.labels[need.queue]
                raise ScheduleError(
                    f"{record.length} ops of kind {kind} of stage {stage} need {needed} of kind {of_kind} of stage "
                    f"{at}, in groups of {need.after} and {need.before}, but there are {there}; change the groups or "
                    "the number of ops",
                    rule="dependencies",
                )


def _turns(
    size: Sequence[int], needs: Sequence[Sequence[tuple[int, float, int, int]]]
) -> tuple[list[int], list[int]]:
    """Of each queue, ops in a turn, and turns: the smallest turns that needs do not reach beyond."""
    every = [(q, source, before, after) for q, found in enumerate(needs) for source, _, before, after in found]
    if all(before == after == 1 and size[q] == size[source] for q, source, before, after in every):
        return [1] * len(size), list(size)
    num_turns = gcd(*size)
    for turns in range(num_turns, 0, -1):
        if num_turns % turns == 0 and all(
            size[q] % (turns * after) == 0
            and size[source] % (turns * before) == 0
            and size[q] // after == size[source] // before
            for q, source, before, after in every
        ):
            return [n // turns for n in size], [turns] * len(size)
    return list(size), [1] * len(size)
