"""Which messages each op of a rank receives and sends, and in which order a rank expects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from penstock.dispatch import Graph, lower
from penstock.dispatch.graph import version_order
from penstock.runtime.tensors.message import Edge
from penstock.schedule import Op, Schedule
from penstock.schedule.dependencies import carries_message, completed, predecessors
from penstock.schedule.op import FORWARD, OF_UPDATES, PREDICT, UPDATE
from penstock.schedule.placement import ranks_together
from penstock.schedule.updates import OWNER, one_message_a_rank


class WiredOp(NamedTuple):
    """One op on one rank, with its edges.

    Attributes:
        inputs: (edge, whether it comes from another rank) of all that come in, tokens last.
        num_tokens: how many of the inputs are tokens.
        output_edges: the edges that a handler of the op gives a payload for: those that go out, each once, without
            tokens.
        sends: (place of the edge in `output_edges`, or -1 for a token; edge; rank that it goes to; whether that is
            this rank) of all that goes out. What goes to several ranks is there once for each, one after the other.
    """

    op: Op
    inputs: tuple[tuple[Edge, bool], ...]
    num_tokens: int
    output_edges: tuple[Edge, ...]
    sends: tuple[tuple[int, Edge, int, bool], ...]

    @property
    def input_edges(self) -> tuple[Edge, ...]:
        """The edges that come in, tokens last."""
        return tuple(edge for edge, _ in self.inputs)

    @property
    def received_edges(self) -> tuple[Edge, ...]:
        """Those of `input_edges` that come from other ranks."""
        return tuple(edge for edge, is_remote in self.inputs if is_remote)


@dataclass(frozen=True)
class Wiring:
    """The edges of a schedule, seen from its ops.

    Between ranks there are tokens too, for what the stage graph's needs ask; on a rank the graph alone counts them.

    What several ranks run together each of them has: it takes in what the op needs, and hands the outcome to itself.
    The first of them sends it to others.

        F3 on rank 3 ---> head's F on ranks 0, 1, 2, 3        one message to each of 0, 1 and 2
        head's B on ranks 0, 1, 2, 3 ---> B3 on rank 3        no message: rank 3 has it

    Attributes:
        graph: what the decision core works on; it counts every edge.
        incoming, outgoing: per op, in a fixed order, tokens last; of all ranks that run it.
    """

    schedule: Schedule
    graph: Graph
    incoming: dict[Op, tuple[Edge, ...]]
    outgoing: dict[Op, tuple[Edge, ...]]

    def rank_of(self, op: Op) -> int:
        """The rank that runs an op; the one that sends what came of it, where several do."""
        return self.graph.host(self.graph.number[op])

    def ranks_of(self, op: Op) -> tuple[int, ...]:
        """The ranks that run an op."""
        return self._together.get(op) or (self.rank_of(op),)

    def sender(self, edge: Edge, rank: int) -> int:
        """The rank from which `rank` has what an edge carries: itself, where it runs the producer."""
        ranks = self._together.get(edge.producer)
        return rank if ranks is not None and rank in ranks else self.rank_of(edge.producer)

    @cached_property
    def _together(self) -> dict[Op, tuple[int, ...]]:
        return ranks_together(self.schedule)

    @cached_property
    def wired_ops(self) -> list[WiredOp]:
        """The edges of each op, by its number."""
        return [self._wired_op(op, self.graph.host(number)) for number, op in enumerate(self.graph.ops)]

    def _wired_op(self, op: Op, rank: int) -> WiredOp:
        incoming = [(edge, self.sender(edge, rank)) for edge in self.incoming[op] if self._travels(edge, rank)]
        outgoing = [
            (edge, target)
            for edge in self.outgoing[op]
            for target in self.ranks_of(edge.consumer)
            if self.sender(edge, target) == rank and self._travels(edge, target)
        ]
        output_edges = tuple(dict.fromkeys(edge for edge, _ in outgoing if not edge.is_token))
        place = {edge: number for number, edge in enumerate(output_edges)}
        return WiredOp(
            op,
            tuple((edge, source != rank) for edge, source in incoming),
            sum(edge.is_token for edge, _ in incoming),
            output_edges,
            tuple((place.get(edge, -1), edge, target, target == rank) for edge, target in outgoing),
        )

    def _travels(self, edge: Edge, target: int) -> bool:
        """Whether a rank is told of an edge. It is not told by tokens of what it ran itself, nor of what another one
        ran that begins an asynchronous op together with it.
        """
        if not edge.is_token:
            return True
        source = self.sender(edge, target)
        together = edge.consumer[:2] in self.schedule.asynchronous and source in self.ranks_of(edge.consumer)
        return source != target and not together

    def _numbers_of(self, rank: int) -> list[int]:
        """The ops of a rank, then those of its stream."""
        first, num_ranks = self.graph.first, self.graph.num_ranks
        own = list(range(first[rank], first[rank + 1]))
        if self.graph.has_streams:
            own += range(first[num_ranks + rank], first[num_ranks + rank + 1])
        return own

    def numbers(self, rank: int) -> dict[Op, int]:
        """The number of each op that the rank runs, and perhaps of others."""
        if not self._together:
            return self.graph.number
        return {self.graph.ops[number]: number for number in self._numbers_of(rank)}

    @cached_property
    def tied_values(self) -> dict[Op, tuple[Edge, ...]]:
        """Of each forward that takes new values of tied parameters the edges that bring them."""
        found = {op: tuple(e for e in edges if e.is_tied_value) for op, edges in self.incoming.items()}
        return {op: edges for op, edges in found.items() if edges}

    def waiting(self, rank: int) -> dict[Op, int]:
        """The number of the op that waits for what each op of the rank gets from others: the op itself, or the
        forward of the pair that it is in."""
        number, graph = self.numbers(rank), self.graph
        if not graph.backward_of:
            return number
        return {**number, **{graph.ops[backward]: forward for forward, backward in graph.backward_of.items()}}

    @cached_property
    def awaited(self) -> list[tuple[Edge, ...]]:
        """What each op waits for from other ranks, by its number; the forward of a pair for both."""
        found = [wired.received_edges for wired in self.wired_ops]
        for forward, backward in self.graph.backward_of.items():
            found[forward] += found[backward]
        return found

    def expected(self, rank: int) -> list[Edge]:
        """Messages `rank` gets from other ranks, in the order in which its frozen order needs them."""
        return [edge for number in self._numbers_of(rank) for edge in self.wired_ops[number].received_edges]


def backward_op(schedule_ops: dict[Op, int], stage: int, microbatch: int) -> Op:
    """The op that sends the gradient of `stage` on: its B or its I."""
    full = Op("B", stage, microbatch)
    return full if full in schedule_ops else Op("I", stage, microbatch)


def wire(schedule: Schedule, tied_stages: Sequence[Sequence[int]] = ()) -> Wiring:
    """The wiring of a schedule.

    `tied_stages[k]` are the stages that share tied parameter k, ascending. Where updates are ops, new values go the
    other way than the gradients, with the forwards.
    """
    chain = schedule.graph
    if chain.needs or chain.pairs:
        chain = replace(chain, registered=(), needs=(), pairs=())
    number = {op: index for index, op in enumerate(op for row in schedule.order for op in row)}
    edges = [
        Edge(producer, op)
        for op in number
        if op.kind not in OF_UPDATES
        for producer in predecessors(op, chain, number)
        if carries_message(producer, op)
    ]
    training = any(op.kind != "F" for op in number)
    if training:
        edges += tied_sums(schedule, number, tied_stages)
        edges += _tied_values(schedule, number, tied_stages)
    extra = [(edge.producer, edge.consumer) for edge in edges if edge.slot]
    if bringing := {edge.consumer for edge in edges if edge.is_tied_value}:
        extra += version_order(schedule, bringing)
    graph = lower(schedule, extra=extra)
    edges += _updating(schedule, number, len(tied_stages))
    together = ranks_together(schedule)

    def ranks_of(op: Op) -> Sequence[int]:
        return together.get(op) or (graph.host(graph.number[op]),)

    edges += [
        edge for edge in _needed(schedule, number) if not set(ranks_of(edge.consumer)) <= set(ranks_of(edge.producer))
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


def tied_sums(schedule: Schedule, number: dict[Op, int], tied_stages: Sequence[Sequence[int]]) -> Iterator[Edge]:
    """From the backward of each stage that uses a tied parameter, with the sum of its gradient so far, to that of the
    next one up. Where the upper stage feeds the other, that runs after it anyway, and the edge adds no wait; what
    waits in vain otherwise `compatibility` refuses, and stages with different numbers of microbatches too.
    """
    for slot, stages in enumerate(tied_stages, start=1):
        for upper, lower_one in pairwise(stages):
            for m in range(schedule.graph.microbatches_of(upper, schedule.num_microbatches)):
                yield Edge(backward_op(number, lower_one, m), backward_op(number, upper, m), slot)


def _updating(schedule: Schedule, number: dict[Op, int], num_tied: int) -> Iterator[Edge]:
    """Gradients on their way to the owners of stages, in the order of the pipelines, and parameters coming back."""
    if schedule.updates is None:
        return
    rank_of = {op: rank for rank, row in enumerate(schedule.order) for op in row}
    place = {op: (rank_of[op], step) for op, step in number.items()}
    for op in number:
        if op.kind not in OF_UPDATES:
            continue
        rank, receiver = rank_of[op], schedule.pipeline_of(op)
        needed = one_message_a_rank(predecessors(op, schedule.graph, number), rank, place)
        remote = [(schedule.pipeline_of(producer), producer) for producer in needed if rank_of[producer] != rank]
        for sender, producer in sorted(remote):
            slot = sender if receiver == OWNER else receiver
            yield Edge(producer, op, num_tied + slot + (op.kind == PREDICT) * schedule.placement.num_pipelines)


def first_of_tied_values(num_tied: int, num_pipelines: int) -> int:
    """The first slot of values of tied parameters: after those of their gradients, of updates and of PREDICT."""
    return num_tied + 2 * num_pipelines


def twins_of(tied_stages: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(tie, its owner, a stage that has it too) for every stage but the owner that a tied parameter lies in, in the
    order of their slots for values."""
    return [(tie, stages[0], stage) for tie, stages in enumerate(tied_stages) for stage in stages[1:]]


def _tied_values(schedule: Schedule, number: dict[Op, int], tied_stages: Sequence[Sequence[int]]) -> Iterator[Edge]:
    """From every update of a stage that owns a tied parameter to the first forward, on each other stage that has it,
    whose microbatch comes through the owner's stage after that update.

        stage 0 | F2 U0 F3        stage 3 |  F2 .. F3 reads what U0 has made, as stage 0 did for microbatch 3

    That forward runs after the update anyway, so the edge adds no wait; and all stages read one version in the
    forwards of a microbatch. What no forward follows, stages get when the step is over.
    """
    windows = schedule.windows
    if windows is None:
        return
    first = first_of_tied_values(len(tied_stages), windows.num_pipelines)
    twins = twins_of(tied_stages)
    num_twins = len(twins)
    for place, (_, owner, stage) in enumerate(twins):
        for pipeline in range(windows.num_pipelines):
            come = [m for m, own in enumerate(schedule.microbatch_pipeline) if own == pipeline]
            come.sort(key=lambda m: number[Op(FORWARD, stage, m)])
            waiting = iter(come)
            m = next(waiting, None)
            for update, kind in product(range(windows.num_updates), (PREDICT, UPDATE)):
                op = Op(kind, owner, windows.number(update, pipeline))
                while m is not None and op in number and number[Op(FORWARD, owner, m)] < number[op]:
                    m = next(waiting, None)
                if m is not None and op in number:
                    yield Edge(op, Op(FORWARD, stage, m), first + place + (kind == PREDICT) * num_twins)


def _needed(schedule: Schedule, number: dict[Op, int]) -> Iterator[Edge]:
    """The stage graph's needs, op by op."""
    needs = schedule.graph.needs
    if not needs:
        return
    queues: dict[tuple[str, int], list[Op]] = {}
    for op in number:
        queues.setdefault((op.kind, op.stage), []).append(op)
    for place, need in enumerate(needs, start=1):
        kind, stage = need.after
        for name in ("B", "I") if kind == "B" else (kind,):
            for op in queues.get((name, stage), ()):
                for index in schedule.graph.needed(need, op.microbatch):
                    yield Edge(completed(Op(*need.before, index), number), op, -place)


def num_indices(schedule: Schedule) -> int:
    """The most ops of one kind on one stage: as many as microbatches, or as updates or some registered kind has."""
    updates = 0 if schedule.windows is None else schedule.windows.num_ops
    graph = schedule.graph
    registered = (r.num_ops for r in graph.registered)
    return max([schedule.num_microbatches, updates, *graph.num_microbatches, *registered])
