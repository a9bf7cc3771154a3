"""Queues of ops, the compact form of a schedule yet to be made (`QueueGraph`), and the `Lister` that makes its rows.

A queue is one kind of op of one stage in one pipeline. Its ops run in microbatch order, which costs nothing
(any schedule can be rearranged so, by exchange) and makes the state of a queue a single count. What ops
wait for is said between queues, once for all microbatches, so a problem of millions of ops is a few arrays.

    queue 0  F of stage 0   4 ops, on rank 0         queue 2  F of stage 1   needs queue 0, + link delay
    queue 1  B of stage 0   needs 0 and 3 (+ delay)  queue 3  B of stage 1   needs queue 2

A rank's order is then a row of queue numbers. `Lister` makes the row by rules
(`engine.list_by_rules`), which run compiled where that pays:

    lister = Lister(graph)                 # buffers and compiled code, to be used many times
    listed = lister.list_by_rules(tables)  # tables: the graph's, with rules filled in
    listed.makespan, listed.schedule("mine")
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import gcd, inf
from types import ModuleType
from typing import Any

from penstock.cost import Costs, Links
from penstock.engine import list_by_rules
from penstock.engine.arrays import prepared
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.memory_safety import reserves
from penstock.engine.network import Irregularities, Network, of_queues
from penstock.engine.rule_tables import (
    BACKWARD,
    FIRST,
    FORWARD,
    LAST,
    WEIGHT,
    QueueRules,
    Tables,
    new_state,
    tables_of,
)
from penstock.engine.tolerance import slack
from penstock.schedule import Needs, Op, Placement, Schedule, ScheduleError, StageGraph
from penstock.schedule.async_ops import joined
from penstock.schedule.async_ops import rows_of as rows_of_ops

CLASS_OF = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}
COUNTS = {"F": 1.0, "B": -1.0, "W": -1.0}
"""By kind, how many forwards in flight an op adds."""

Label = tuple[int, str, int]
"""Of a queue: its pipeline, kind and stage."""


@dataclass(frozen=True)
class QueueGraph:
    """A schedule yet to be made.

    Attributes:
        labels: (pipeline, kind, stage) of each queue.
        microbatches: of each pipeline, its microbatches in order; the k-th op of a queue is of the k-th.
        tables: the queues as the engine lists and times them, as lists. They have no rules yet: backward first,
            queues of a class in stage order, no caps. All needs are said beside the network.
        num_ranks: ranks. Where ops are asynchronous the tables have as many streams after them, each of which is to
            them one more rank (see `schedule.async_ops`).
    """

    placement: Placement
    stage_graph: StageGraph | None
    microbatch_pipeline: tuple[int, ...]
    labels: tuple[Label, ...]
    microbatches: tuple[tuple[int, ...], ...]
    tables: Tables
    num_ranks: int

    @property
    def network(self) -> tuple[Network, Irregularities]:
        """The queues as the engine times them."""
        return self.tables.network, self.tables.more

    @property
    def num_rows(self) -> int:
        """Ranks and streams."""
        return self.tables.network.num_ranks

    @property
    def num_queues(self) -> int:
        return len(self.labels)

    @property
    def num_ops(self) -> int:
        """All ops; one that several ranks run together counts once."""
        return self.tables.network.num_ops

    def hosts(self, queue: int) -> list[int]:
        """The ranks that run a queue's ops, or their streams."""
        more = self.tables.more
        return list(more.hosts[more.host_first[queue] : more.host_first[queue + 1]])

    def op(self, queue: int, index: int) -> Op:
        """The `index`-th op of a queue."""
        pipeline, kind, stage = self.labels[queue]
        return Op(kind, stage, self.microbatches[pipeline][index] if self.is_dealt(kind, stage) else index)

    def is_dealt(self, kind: str, stage: int) -> bool:
        """Whether the ops of a queue are numbered as the microbatches of its pipeline."""
        graph = self.stage_graph
        if graph is None:
            return True
        return (kind in CLASS_OF and not graph.num_microbatches) or (kind, stage) in graph.some_of

    def schedule(
        self,
        name: str,
        rows: Sequence[Sequence[int]],
        max_in_flight: float | None = None,
        start_time: Sequence[float] | None = None,
    ) -> Schedule:
        """The schedule whose ranks, and streams, run the rows of queue numbers.

        Args:
            start_time: of each op, queue by queue: so that what an asynchronous op takes again is not taken before.
        """
        order: list[tuple[Op, ...]] = []
        graph = self.stage_graph
        dealt = [self.is_dealt(kind, stage) for _, kind, stage in self.labels]
        for row in rows:
            seen = [0] * self.num_queues
            ops = []
            for queue in row:
                pipeline, kind, stage = self.labels[queue]
                index = seen[queue]
                seen[queue] = index + 1
                ops.append(Op(kind, stage, self.microbatches[pipeline][index] if dealt[queue] else index))
            order.append(tuple(ops))
        made = tuple(order)
        if graph is not None and len(order) > self.num_ranks:
            after = {} if start_time is None else self._taken_after(rows, order, start_time)
            made = joined(graph, order[: self.num_ranks], order[self.num_ranks :], after)
        return Schedule(name, self.placement, made, self.microbatch_pipeline, max_in_flight, graph)

    def _taken_after(
        self, rows: Sequence[Sequence[int]], order: Sequence[Sequence[Op]], start_time: Sequence[float]
    ) -> dict[tuple[Op, int], Op]:
        """By (asynchronous op that takes memory, rank) the last op of the rank that had ended when it began."""
        found: dict[tuple[Op, int], Op] = {}
        holds = self.stage_graph.holds if self.stage_graph else {}
        for rank in range(self.num_ranks):
            stream = rank + self.num_ranks
            starts = [list(self._starts(rows[row], start_time)) for row in (rank, stream)]
            durations = self.tables.network.duration
            ends = [s + durations[q] for s, q in zip(starts[0], rows[rank], strict=True)]
            for op, start in zip(order[stream], starts[1], strict=True):
                if holds.get(op[:2], 0.0) > 0 and (ended := bisect_right(ends, start + slack(start))):
                    found[op, rank] = order[rank][ended - 1]
        return found

    def _starts(self, row: Sequence[int], start_time: Sequence[float]) -> Iterator[float]:
        seen = [0] * self.num_queues
        for q in row:
            yield float(start_time[self.tables.network.op_first[q] + seen[q]])
            seen[q] += 1


def queue_graph(
    placement: Placement,
    num_ranks: int,
    microbatch_pipeline: Sequence[int],
    costs: Costs,
    links: Links | None = None,
    stage_graph: StageGraph | None = None,
    split: bool | Callable[[int], bool] = False,
    last_kinds: Sequence[str] = (),
) -> QueueGraph:
    """The queues of a model of `placement.num_stages` stages.

    Args:
        microbatch_pipeline: the pipeline of each microbatch.
        split: whether backwards are I and W, for all stages or by a function of the stage.
        last_kinds: registered kinds that run when nothing else can, instead of before everything else.

    Raises:
        ScheduleError: a stage on a rank that is not there, or counts that do not fit together.
        CostError: costs for another number of stages, or a link between ranks that are not there.
    """
    links = links or Links()
    links.check_ranks(num_ranks)
    costs.require_stages(placement.num_stages, "the placement has")
    graph = stage_graph or StageGraph.chain(placement.num_stages)
    mine: list[list[int]] = [[] for _ in placement.pipelines]
    for m, pipeline in enumerate(microbatch_pipeline):
        mine[pipeline].append(m)
    _check_plannable(graph, mine, microbatch_pipeline)
    labels, lengths, hosts = _queues(placement, graph, mine, split if callable(split) else (lambda _: bool(split)))
    for label, ranks in zip(labels, hosts, strict=True):
        if max(ranks) >= num_ranks:
            raise ScheduleError(
                f"stage {label[2]} is placed on rank {max(ranks)}, but there are {num_ranks} ranks", rule="placement"
            )
    apart = {(r.kind, r.stage) for r in graph.registered if r.asynchronous}
    rows = [
        tuple(rank + num_ranks for rank in ranks) if label[1:] in apart else ranks
        for label, ranks in zip(labels, hosts, strict=True)
    ]
    number = {label: q for q, label in enumerate(labels)}
    needs = [
        [
            (p, _delay(links, hosts[p], ranks, label[1:] in apart), before, after, shift)
            for p, before, after, shift in _needs(label, graph, number, lengths, len(mine))
        ]
        for label, ranks in zip(labels, hosts, strict=True)
    ]
    durations = [costs.duration(kind, stage) for _, kind, stage in labels]
    network, more = of_queues(lengths, durations, rows, needs, 2 * num_ranks if apart else num_ranks)
    shares_memory = any(each in graph.holds for each in apart)
    rules = _rules_of(labels, hosts, graph, costs, last_kinds, num_ranks, shares_memory)
    return QueueGraph(
        placement,
        stage_graph,
        tuple(microbatch_pipeline),
        tuple(labels),
        tuple(map(tuple, mine)),
        tables_of(network, more, rules, num_ranks, shares_memory),
        num_ranks,
    )


def _check_plannable(graph: StageGraph, mine: list[list[int]], microbatch_pipeline: Sequence[int]) -> None:
    """Raises ScheduleError where ops are named one by one, or counts do not fit the pipelines."""
    num = len(microbatch_pipeline)
    if graph.num_microbatches and len(mine) > 1:
        raise ScheduleError(
            "stages with microbatch counts of their own need a placement with one pipeline", rule="placement"
        )
    for registered in graph.registered:
        if len(mine) > 1 and len(registered.microbatches) != num:
            raise ScheduleError(
                f"{registered.num_ops} ops of kind {registered.kind} of stage {registered.stage} on a placement with "
                f"{len(mine)} pipelines: each op belongs to one microbatch there, and runs where its stage is for "
                f"it; register one for each of the {num} microbatches, in groups of 1, without `on`",
                rule="placement",
            )
    in_turn = all(k == m % len(mine) for m, k in enumerate(microbatch_pipeline))
    named = [(r.kind, r.stage) for r in graph.registered if r.microbatches and len(r.microbatches) != num]
    named += [need.after for need in graph.needs if need.pairs and not (in_turn and _is_passed(need, num))]
    if named:
        kind, stage = named[0]
        raise ScheduleError(
            f"ops of kind {kind} of stage {stage} are named one by one (by microbatches, or pairs of ops that need "
            "each other): what is yet to be ordered takes needs in groups, of all the ops of a kind; say num_before "
            "and num_after, or write the rows yourself",
            rule="dependencies",
        )


def _queues(
    placement: Placement, graph: StageGraph, mine: list[list[int]], splits: Callable[[int], bool]
) -> tuple[list[Label], list[int], list[tuple[int, ...]]]:
    """The label of each queue, how many ops it has, and the ranks that run them."""
    labels: list[Label] = []
    lengths: list[int] = []
    hosts: list[tuple[int, ...]] = []
    for k in range(len(mine)):
        for stage in range(placement.num_stages):
            for kind in ("F", "I", "W") if splits(stage) else ("F", "B"):
                labels.append((k, kind, stage))
                lengths.append(graph.microbatches_of(stage, len(mine[k])))
                hosts.append(placement.hosts(k, stage))
    for registered in graph.registered:
        for k in range(len(mine)):
            labels.append((k, registered.kind, registered.stage))
            lengths.append(len(mine[k]) if len(mine) > 1 else registered.num_ops)
            hosts.append(registered.ranks or placement.hosts(k, registered.stage))
    return labels, lengths, hosts


def _rules_of(
    labels: list[Label],
    hosts: list[tuple[int, ...]],
    graph: StageGraph,
    costs: Costs,
    last_kinds: Sequence[str],
    num_ranks: int,
    shares_memory: bool,
) -> QueueRules:
    """What the rules know of each queue: class, memory, and the room that must stay free for deeper stages."""
    number = {label: q for q, label in enumerate(labels)}
    classes = [CLASS_OF.get(kind, LAST if kind in last_kinds else FIRST) for _, kind, _ in labels]
    memory = [costs.memory_change(kind, stage) for _, kind, stage in labels]
    count = [COUNTS.get(kind, 0.0) for _, kind, _ in labels]
    for q, (_, kind, stage) in enumerate(labels):
        if share := graph.holds.get((kind, stage)):
            memory[q] += share * costs.activation[stage]
            count[q] = share
    of_stage = depths(graph)
    depth = [of_stage[stage] for _, _, stage in labels]
    forwards = [q for q, (_, kind, _) in enumerate(labels) if kind == "F"]
    taken_again = [q for q, (_, kind, stage) in enumerate(labels) if graph.holds.get((kind, stage), 0.0) > 0]
    return QueueRules(
        op_class=classes,
        memory=memory,
        count=count,
        reserve=reserves(memory, [taken_again, forwards], hosts, depth, num_ranks),
        reserve_count=reserves(count, [taken_again, forwards], hosts, depth, num_ranks),
        release=[
            number.get((k, "W", s), number.get((k, "B", s), -1)) if kind == "F" else -1 for k, kind, s in labels
        ],
        cap=[inf] * len(labels),
        late=[int(shares_memory and (m < 0 or c < 0)) for m, c in zip(memory, count, strict=True)],
    )


def _is_passed(need: Needs, num_microbatches: int) -> bool:
    """Whether every op of a kind comes after that of the microbatch before, and nothing else is said."""
    every = tuple((m - 1, m) for m in range(1, num_microbatches))
    return need.before == need.after and tuple(sorted(need.pairs)) == every


def _needs(
    label: Label,
    graph: StageGraph,
    number: dict[Label, int],
    lengths: list[int],
    num_pipelines: int,
) -> list[tuple[int, int, int, int]]:
    """(queue, before, after, shift) of everything an op of this queue waits for."""
    pipeline, kind, stage = label

    def backward(s: int, half: str = "I") -> int:
        whole = (pipeline, "B", s)
        return number[whole if whole in number else (pipeline, half, s)]

    def across(other: int) -> tuple[int, int, int, int]:
        there, here = lengths[other], lengths[number[label]]
        unit = gcd(there, here) or 1
        return other, max(1, there // unit), max(1, here // unit), 0

    found: list[tuple[int, int, int, int]] = []
    if kind == "F":
        found = [across(number[pipeline, "F", source]) for source in graph.sources[stage]]
    elif kind == "W":
        found = [(number[pipeline, "I", stage], 1, 1, 0)]
    elif kind in ("B", "I"):
        found = [(number[pipeline, "F", stage], 1, 1, 0)]
        found += [across(backward(target)) for target in graph.targets[stage]]
    for need in graph.needs_of.get((kind, stage), ()):
        before_kind, before = need.before
        if need.pairs:  # the op of the microbatch before, which is in the pipeline before
            last = (pipeline - 1) % num_pipelines
            found.append((number[last, before_kind, before], 1, 1, 0 if pipeline > 0 else -1))
            continue
        k = pipeline if (pipeline, before_kind, before) in number else 0
        source = backward(before, "W") if before_kind == "B" else number[k, before_kind, before]
        found.append((source, need.num_before, need.num_after, 0))
    return found


def _delay(links: Links, source: tuple[int, ...], target: tuple[int, ...], asynchronous: bool) -> float:
    """Until all ranks of `target` have what `source` made: each has it already, or the first of `source` sends. Ranks
    begin an asynchronous op together, without word of what one of them made.
    """
    if asynchronous and source[0] in target:
        return 0.0
    return max(0.0 if rank in source else links.delay(source[0], rank) for rank in target)


def depths(graph: StageGraph) -> list[int]:
    """Of each stage, the most stages on a path to it."""
    depth = [0] * graph.num_stages
    for stage in TopologicalSorter(dict(enumerate(graph.sources))).static_order():
        depth[stage] = max((depth[source] + 1 for source in graph.sources[stage]), default=0)
    return depth


@dataclass(frozen=True)
class ListedRun:
    """Rows and times of a run.

    Attributes:
        reached: how many places of each row have run: fewer than there are where the ranks got stuck.
        makespan: first op's start to last op's end (ms); infinite where the ranks got stuck.
    """

    graph: QueueGraph
    rows: Any
    row_first: Sequence[int]
    start_time: Any
    reached: Sequence[int]
    makespan: float

    @property
    def complete(self) -> bool:
        """Whether every op has run."""
        return sum(self.reached) == self.row_first[-1]

    def copy_rows(self) -> list[list[int]]:
        """Each rank's queue numbers in order, up to where it got; then those of streams, where there are any."""
        begins = self.row_first[:-1]
        return [[int(q) for q in self.rows[a : a + done]] for a, done in zip(begins, self.reached, strict=True)]

    def schedule(self, name: str, max_in_flight: float | None = None) -> Schedule:
        """The schedule that was made."""
        return self.graph.schedule(name, self.copy_rows(), max_in_flight, self.start_time)


class Lister:
    """Runs one queue graph, many times.

    Args:
        compile: whether to run as C; by default where that can be had.
    """

    def __init__(self, graph: QueueGraph, compile: bool | None = None) -> None:
        self.graph = graph
        self._as_c = is_compiled() if compile is None else compile
        self._loop: ModuleType = compiled(list_by_rules) if self._as_c else list_by_rules
        network, more = graph.network
        self._network, self._more = prepared(network, self._as_c), prepared(more, self._as_c)

    def list_by_rules(self, tables: Tables) -> ListedRun:
        """Makes rows by the rules in `tables`, which are those of the graph with other rules."""
        state = new_state(tables, self._as_c)
        self._loop.run(
            Tables(
                self._network,
                self._more,
                prepared(tables.queues, self._as_c),
                prepared(tables.ranks, self._as_c),
                prepared(tables.slots, self._as_c),
            ),
            state,
        )
        reached, row_first = list(map(int, state.filled)), tables.network.row_first
        makespan = float(max(state.free_at)) if sum(reached) == row_first[-1] else inf
        return ListedRun(self.graph, state.rows, row_first, state.start_time, reached, makespan)


def rows_of(graph: QueueGraph, schedule: Schedule) -> list[list[int]]:
    """A schedule's rows as queue numbers; its ops must be those of the graph, each queue's in microbatch order.

    Raises ValueError for a schedule that is not of this graph.
    """
    number = {label: q for q, label in enumerate(graph.labels)}
    seen: dict[tuple[int, int], int] = {}
    rows = []
    for rank, row in enumerate(rows_of_ops(schedule)):
        numbers = []
        for op in row:
            pipeline = schedule.microbatch_pipeline[op.microbatch] if len(graph.microbatches) > 1 else 0
            q = number.get((pipeline, op.kind, op.stage))
            if q is None or graph.op(q, seen.get((rank, q), 0)) != op:
                raise ValueError(f"rank {rank}: {op} is not the next op of its queue in microbatch order")
            seen[rank, q] = seen.get((rank, q), 0) + 1
            numbers.append(q)
        rows.append(numbers)
    return rows
