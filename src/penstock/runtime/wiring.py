"""Which messages each op of a rank takes in and gives out, and in which order a rank expects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.dispatch import Graph, lower
from penstock.runtime.message import Edge
from penstock.schedule import Op, Schedule
from penstock.schedule.dependencies import carries_message, predecessors
from penstock.schedule.op import UPDATE
from penstock.schedule.updates import OWNER, one_message_a_rank


class Station(NamedTuple):
    """One op with its edges: all that come in, those of them from other ranks, and (edge, rank) going out."""

    op: Op
    incoming: tuple[Edge, ...]
    remote: tuple[Edge, ...]
    outgoing: tuple[tuple[Edge, int], ...]


@dataclass(frozen=True)
class Wiring:
    """The edges of a schedule, seen from its ops.

    Between ranks there are tokens too, for what the stage graph's needs ask; on a rank the graph alone counts them.

    Attributes:
        graph: what the decision core works on; it counts every edge.
        incoming, outgoing: per op, in a fixed order, tokens last.
    """

    schedule: Schedule
    graph: Graph
    incoming: dict[Op, tuple[Edge, ...]]
    outgoing: dict[Op, tuple[Edge, ...]]

    def rank_of(self, op: Op) -> int:
        return self.graph.rank[self.graph.number[op]]

    @cached_property
    def stations(self) -> list[Station]:
        """The edges of each op, by its number."""
        return [
            Station(
                op,
                self.incoming[op],
                tuple(edge for edge in self.incoming[op] if self.rank_of(edge.producer) != rank),
                tuple((edge, self.rank_of(edge.consumer)) for edge in self.outgoing[op]),
            )
            for op, rank in zip(self.graph.ops, self.graph.rank, strict=True)
        ]

    @cached_property
    def num_tokens(self) -> dict[Op, int]:
        """How many tokens come in for an op, for those that get any."""
        counts = {op: sum(edge.is_token for edge in edges) for op, edges in self.incoming.items()}
        return {op: count for op, count in counts.items() if count}

    def expected(self, rank: int) -> list[Edge]:
        """Messages `rank` gets from other ranks, in the order in which its frozen order needs them."""
        graph = self.graph
        mine = graph.ops[graph.first[rank] : graph.first[rank + 1]]
        return [edge for op in mine for edge in self.incoming[op] if self.rank_of(edge.producer) != rank]


def backward_op(schedule_ops: dict[Op, int], stage: int, microbatch: int) -> Op:
    """The op that sends the gradient of `stage` on: its B or its I."""
    full = Op("B", stage, microbatch)
    return full if full in schedule_ops else Op("I", stage, microbatch)


def wire(schedule: Schedule, tied_stages: Sequence[Sequence[int]] = ()) -> Wiring:
    """The wiring of a schedule.

    `tied_stages[k]` are the stages that share tied parameter k, ascending. The backward of each sends the sum
    of the gradient so far to that of the next one up, which runs after it anyway: the edge adds no wait that
    the chain of stages does not have.
    """
    chain = replace(schedule.graph, registered=(), needs=()) if schedule.graph.needs else schedule.graph
    number = {op: index for index, op in enumerate(op for row in schedule.order for op in row)}
    edges = [
        Edge(producer, op)
        for op in number
        if op.kind != UPDATE
        for producer in predecessors(op, chain, number)
        if carries_message(producer, op)
    ]
    training = any(op.kind != "F" for op in number)
    if training:
        for slot, stages in enumerate(tied_stages, start=1):
            for upper, lower_one in pairwise(stages):
                edges += [
                    Edge(backward_op(number, lower_one, m), backward_op(number, upper, m), slot)
                    for m in range(schedule.num_microbatches)
                ]
    graph = lower(schedule, extra=[(edge.producer, edge.consumer) for edge in edges if edge.slot])
    edges += _updating(schedule, number, len(tied_stages))
    edges += [
        edge
        for edge in _needed(schedule, number)
        if graph.rank[graph.number[edge.producer]] != graph.rank[graph.number[edge.consumer]]
    ]
    incoming: dict[Op, list[Edge]] = {op: [] for op in number}
    outgoing: dict[Op, list[Edge]] = {op: [] for op in number}
    for edge in edges:
        incoming[edge.consumer].append(edge)
        outgoing[edge.producer].append(edge)
    return Wiring(
        schedule,
        graph,
        {op: tuple(found) for op, found in incoming.items()},
        {op: tuple(found) for op, found in outgoing.items()},
    )


def _updating(schedule: Schedule, number: dict[Op, int], num_tied: int) -> Iterator[Edge]:
    """Gradients on their way to the owners of stages, in the order of the pipelines, and parameters coming back."""
    if schedule.updates is None:
        return
    rank_of = {op: rank for rank, row in enumerate(schedule.order) for op in row}
    place = {op: (rank_of[op], step) for op, step in number.items()}
    for op in number:
        if op.kind != UPDATE:
            continue
        rank, receiver = rank_of[op], schedule.pipeline_of(op)
        needed = one_message_a_rank(predecessors(op, schedule.graph, number), rank, place)
        remote = [(schedule.pipeline_of(producer), producer) for producer in needed if rank_of[producer] != rank]
        for sender, producer in sorted(remote):
            yield Edge(producer, op, num_tied + (sender if receiver == OWNER else receiver))


def _needed(schedule: Schedule, number: dict[Op, int]) -> Iterator[Edge]:
    """The stage graph's needs, op by op."""
    needs = schedule.graph.needs
    if not needs:
        return
    queues: dict[tuple[str, int], list[Op]] = {}
    for op in number:
        queues.setdefault((op.kind, op.stage), []).append(op)
    for place, need in enumerate(needs, start=1):
        (before_kind, before), (kind, stage) = need.before, need.after
        for name in ("B", "I") if kind == "B" else (kind,):
            for op in queues.get((name, stage), ()):
                for index in need.needed(op.microbatch):
                    one = backward_op(number, before, index) if before_kind == "B" else Op(before_kind, before, index)
                    yield Edge(one, op, -place)


def num_indices(schedule: Schedule) -> int:
    """The most ops of one kind on one stage: as many as microbatches, or as updates or some registered kind has."""
    updates = 0 if schedule.windows is None else schedule.windows.num_ops
    graph = schedule.graph
    registered = (r.num_ops for r in graph.registered)
    return max([schedule.num_microbatches, updates, *graph.num_microbatches, *registered])
