"""A schedule lowered to plain arrays, the form the decision core works on.

Ops are numbered row by row in the order of the schedule, so row r owns ops `first[r]` to `first[r + 1] - 1` and the
number of an op is also its place in the frozen order. Rows are ranks. Where ops are asynchronous a stream for each
rank follows, which the core takes for one more rank (see `schedule.async_ops`).

    schedule   rank 0 | F0 F1 B0 B1        rank 1 | F0 B0 F1 B1
    op               0  1  2  3                     4  5  6  7
    edges      0->4, 1->6, 5->2, 7->3 (messages), 0->2, 1->3, 4->5, 6->7 (on the rank)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from penstock.engine.network import OpNetwork, starts_of
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.async_ops import launches, memory_edges, rows_of
from penstock.schedule.columns import KINDS as COLUMN_KINDS
from penstock.schedule.columns import NOTHING as MISSING
from penstock.schedule.columns import Array, Columns, R, accumulation_edges, edges_of, numbered
from penstock.schedule.dependencies import predecessors
from penstock.schedule.op import COMMUNICATION, FORWARD, KINDS, OF_UPDATES, UPDATE
from penstock.schedule.placement import ranks_together
from penstock.schedule.updates import one_message_a_rank

PRIORITY = {"B": 0, "I": 0, "F": 1, "W": 2, "R": 2, "U": 2, "GIVE": 0, "PREDICT": 0} | dict.fromkeys(COMMUNICATION, 0)
"""What a rank prefers among ready ops: backward (it unlocks other ranks and frees memory), then F, then W and U.

Messages and registered ops come first, as they unlock other ranks.
"""
ALONE = -1
"""The gang of an op that one rank runs alone."""


class Graph:
    """A schedule lowered to a network of ops, made once and never changed.

    Each array of the network is a list here, by its name.

    Attributes:
        arrays: the network. The ops of pairs (see `schedule.pairs`) are gangs of one, since gangs run in their turn.
        ops: op number -> Op. An op that several ranks run together has a number on each of them.
        number: Op -> its number; on the first of the ranks that run it together where it has several.
        num_ranks: how many rows are ranks.
        holds: (kind, stage) -> the stage activations that a registered op takes, or gives back (below 0).
        some: (kind, stage) of registered ops that are of some microbatches each.
        columns: the ops as numbers; None where some are not plain.
        backward_of: of each forward that is in a pair, the number of its backward.
    """

    def __init__(
        self,
        rows: Callable[[], Sequence[Sequence[Op]]],
        num_ranks: int,
        arrays: OpNetwork,
        number: dict[Op, int] | None = None,
        columns: Columns | None = None,
        holds: Mapping[tuple[str, int], float] | None = None,
        some: Collection[tuple[str, int]] = (),
        backward_of: Mapping[int, int] | None = None,
    ) -> None:
        self._rows, self.num_ranks, self.arrays, self.columns = rows, num_ranks, arrays, columns
        self.holds, self.some, self.backward_of = holds or {}, some, backward_of or {}
        if number is not None:
            self.__dict__["number"] = number
        self._own: dict[int, list[tuple[int, ...]]] = {}

    def __getattr__(self, name: str) -> list[int]:
        """An array of the network as a list, made when it is first asked for."""
        if name not in OpNetwork._fields:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)
        found: list[int] = getattr(self.arrays, name).tolist()
        return vars(self).setdefault(name, found)

    @cached_property
    def ops(self) -> list[Op]:
        return list(itertools.chain.from_iterable(self._rows()))

    @cached_property
    def lists(self) -> OpNetwork:
        """The network as lists, for the decider as Python."""
        return OpNetwork(*(getattr(self, name) for name in OpNetwork._fields))

    @cached_property
    def number(self) -> dict[Op, int]:
        return {op: index for index, op in enumerate(self.ops)}

    @cached_property
    def sources(self) -> Array:
        """The op that each edge begins at, an array."""
        return np.repeat(np.arange(self.num_ops), np.diff(self.arrays.edge_first))

    @property
    def num_ops(self) -> int:
        return len(self.arrays.rank)

    @property
    def num_rows(self) -> int:
        return len(self.arrays.first) - 1

    @property
    def has_streams(self) -> bool:
        """Whether there are streams besides the ranks."""
        return self.num_rows > self.num_ranks

    @property
    def has_shared_ops(self) -> bool:
        """Whether several ranks run some op together."""
        return len(self.arrays.gang_ops) > len(self.arrays.gang_first) - 1

    @cached_property
    def node_of(self) -> Array:
        """The op that stands for each op: the first of its gang, or the op itself. An array."""
        node, gang = np.arange(self.num_ops), self.arrays.gang
        together = np.flatnonzero(gang >= 0)
        node[together] = self.arrays.gang_ops[self.arrays.gang_first[gang[together]]]
        return node

    def successors(self, op: int) -> list[int]:
        """The ops that need an op."""
        return self.edge_to[self.edge_first[op] : self.edge_first[op + 1]]

    def own_successors(self, rank: int) -> list[tuple[int, ...]]:
        """Of each op those of its successors that a rank runs, or its stream; worked out once."""
        if rank not in self._own:
            rows, row = (rank, self.num_ranks + rank), self.rank
            self._own[rank] = [tuple(o for o in self.successors(op) if row[o] in rows) for op in range(self.num_ops)]
        return self._own[rank]

    def receives(self, producer: int, op: int) -> Op:
        """The op that what `producer` made is for, where `op` waits for it: in a pair the forward waits for both."""
        backward = self.backward_of.get(op)
        if backward is None or self.ops[producer].kind == FORWARD:
            return self.ops[op]
        return self.ops[backward]

    def host(self, op: int) -> int:
        """The rank of an op, be it on its stream."""
        return self.rank[op] % self.num_ranks


def lower(schedule: Schedule, extra: Sequence[tuple[Op, Op]] = ()) -> Graph:
    """Lowers a schedule that `check` accepts, or its `forward_only` form.

    Args:
        schedule: what is lowered.
        extra: more (producer, consumer) pairs than the chain of stages has, like a tensor that skips stages.

    Raises:
        ScheduleError: an op occurs twice, is of a kind or stage that is not there, or needs one that is missing.
    """
    if not extra and (made := _lower_columns(schedule)) is not None:
        return made
    rows = rows_of(schedule)
    ops = [op for row in rows for op in row]
    rank = [r for r, row in enumerate(rows) for _ in row]
    together = ranks_together(schedule)
    number = {op: index for index, op in enumerate(ops)}
    numbers: dict[Op, list[int]] = {}
    if together:
        for index, op in enumerate(ops):
            if op in together:
                numbers.setdefault(op, []).append(index)
        number |= {op: found[0] for op, found in numbers.items()}
    first = list(itertools.accumulate(map(len, rows), initial=0))

    _check_known(schedule, ops, number, together)
    for op, found in numbers.items():
        sender = schedule.hosts(op)[0] + (schedule.num_ranks if op[:2] in schedule.asynchronous else 0)
        number[op] = next((n for n in found if rank[n] == sender), found[0])
    edges = _needed(schedule, number, rank)
    _check_closed(number, edges)
    if lost := next((op for pair in schedule.pairs for op in pair if op not in number), None):
        raise _refused(lost, "is missing, and is in a pair")
    between: Iterator[tuple[int, int]]
    row_of, firsts = np.array(rank, np.int64), np.array(first, np.int64)
    stage = np.array([op.stage for op in ops], np.int64)
    kind = np.array([COLUMN_KINDS.index(op.kind) if op.kind in COLUMN_KINDS else MISSING for op in ops], np.int64)
    before, after = accumulation_edges(kind, row_of, stage)
    accumulated = [(ops[a], ops[b]) for a, b in zip(before.tolist(), after.tolist(), strict=True)]
    needs = [*edges, *_of_forwards(schedule, [*accumulated, *version_order(schedule), *extra])]
    needs += [] if schedule.max_in_flight is None else memory_edges(schedule, schedule.max_in_flight)
    if numbers or schedule.asynchronous:
        between = _between_gangs(schedule, needs, number, numbers, rank)
    else:
        between = ((number[producer], number[consumer]) for producer, consumer in needs)
    producer, consumer = np.array(list(between), np.int64).reshape(-1, 2).T
    priority = np.array([PRIORITY.get(op.kind, 0) for op in ops], np.int64)
    kinds = {kind: n for n, kind in enumerate(sorted({op.kind for op in ops} - {*KINDS}), start=1)}
    own_kind = np.array([kinds.get(op.kind, 0) for op in ops], np.int64)
    backward_of = {number[forward]: number[backward] for forward, backward in schedule.pairs}
    in_turn = [[member] for pair in backward_of.items() for member in pair]
    gangs, place = [*numbers.values(), *in_turn], _places(schedule, rows)
    arrays = _network(row_of, firsts, producer, consumer, priority, stage, own_kind, place, gangs)
    return Graph(
        lambda: rows,
        schedule.num_ranks,
        arrays,
        number,
        holds=schedule.graph.holds,
        some=schedule.graph.some_of,
        backward_of=backward_of,
    )


def _lower_columns(schedule: Schedule) -> Graph | None:
    """The graph of a schedule that has columns; None for others, and where an op is not as it should be."""
    found = numbered(schedule)
    if found is None:
        return None
    producer, consumer = edges_of(found, schedule.graph.targets)
    if np.any(producer == MISSING):
        return None
    columns = found.columns
    more = accumulation_edges(columns.kind, columns.rank, columns.stage)
    producer, consumer = np.concatenate([producer, more[0]]), np.concatenate([consumer, more[1]])
    priority = np.array([PRIORITY[kind] for kind in COLUMN_KINDS], np.int64)[columns.kind]
    own_kind, place = (columns.kind == R).astype(np.int64), np.arange(columns.num_ops)
    arrays = _network(columns.rank, columns.first, producer, consumer, priority, columns.stage, own_kind, place, [])
    return Graph(lambda: schedule.order, schedule.num_ranks, arrays, columns=columns)


def _network(
    rank: Array,
    first: Array,
    producer: Array,
    consumer: Array,
    priority: Array,
    stage: Array,
    own_kind: Array,
    place: Array,
    gangs: list[list[int]],
) -> OpNetwork:
    """The network of ops numbered row by row.

    Args:
        rank, first, priority, place: as in `OpNetwork`.
        producer, consumer: the two ops of each edge.
        stage: of each op.
        own_kind: of each op, a number for each kind other than F, B, I and W, whose ops have queues of their own.
        gangs: ops that are taken in their turn alone: those that several ranks run together, and those of pairs, one
            each.
    """
    num_ops = len(rank)
    queue = (rank * 3 + priority) * (int(stage.max(initial=0)) + 1) + stage
    queue = queue * (int(own_kind.max(initial=0)) + 1) + own_kind
    queue_ops = np.argsort(queue, kind="stable")
    begins = np.flatnonzero(np.diff(queue[queue_ops], prepend=-1))
    queue_of = np.zeros(num_ops, np.int64)
    queue_of[queue_ops] = np.repeat(np.arange(len(begins)), np.diff(begins, append=num_ops))
    gang = np.full(num_ops, ALONE, np.int64)
    for index, members in enumerate(gangs):
        gang[members] = index
    return OpNetwork(
        rank=rank,
        first=first,
        num_needed=np.bincount(consumer, minlength=num_ops),
        edge_first=starts_of(producer, num_ops),
        edge_to=consumer[np.argsort(producer, kind="stable")],
        queue_rank_first=starts_of(rank[queue_ops[begins]], len(first) - 1),
        queue_first=np.append(begins, num_ops),
        queue_ops=queue_ops,
        queue_of=queue_of,
        priority=priority,
        place=place,
        gang=gang,
        gang_first=np.array([0, *itertools.accumulate(map(len, gangs))], np.int64),
        gang_ops=np.array(list(itertools.chain(*gangs)), np.int64),
    )


def _places(schedule: Schedule, rows: Sequence[Sequence[Op]]) -> Array:
    """Where each op stands in the order of its rank."""
    if len(rows) == schedule.num_ranks:
        return np.arange(sum(map(len, rows)))
    at = [{op: place for place, op in enumerate(row)} for row in schedule.order]
    return np.array([at[r % schedule.num_ranks][op] for r, row in enumerate(rows) for op in row], np.int64)


def _between_gangs(
    schedule: Schedule,
    pairs: Iterable[tuple[Op, Op]],
    number: dict[Op, int],
    numbers: dict[Op, list[int]],
    rank: list[int],
) -> Iterator[tuple[int, int]]:
    """Edges from producers to consumers, either of which several ranks may run together; and to asynchronous ops from
    what their rank runs before it comes to them.

    What several ranks made together is at hand on each of them; the first sends it to others. Ranks that begin an
    asynchronous op together need no word of what ran on one of them.
    """
    num_ranks, apart = schedule.num_ranks, schedule.asynchronous

    def at(op: Op, host: int) -> int:
        if op not in numbers:
            return number[op]
        return next((n for n in numbers[op] if rank[n] % num_ranks == host), number[op])

    for producer, consumer in pairs:
        targets = numbers.get(consumer, (number[consumer],))
        hosts = {rank[target] % num_ranks for target in targets} if consumer[:2] in apart else set()
        for target in targets:
            source = at(producer, host := rank[target] % num_ranks)
            if rank[source] % num_ranks == host or rank[source] % num_ranks not in hosts:
                yield source, target
    for before, op, host in launches(schedule):
        yield at(before, host), at(op, host)


def _needed(schedule: Schedule, number: dict[Op, int], rank: list[int]) -> list[tuple[Op, Op]]:
    """(producer, consumer) of everything that ops need; an update needs one message from each other rank."""
    graph = schedule.graph
    place = {op: (rank[n], n) for op, n in number.items()} if schedule.updates else {}
    edges: list[tuple[Op, Op]] = []
    for op in number:
        needed = predecessors(op, graph, number)
        if op.kind == UPDATE:
            needed = one_message_a_rank(needed, place[op][0], place)
        edges.extend((producer, op) for producer in needed)
    return edges


def _of_forwards(schedule: Schedule, edges: Sequence[tuple[Op, Op]]) -> Iterator[tuple[Op, Op]]:
    """The edges, those to the backward of a pair led to its forward instead: there the pair begins."""
    forward_of = schedule.graph.forward_of if schedule.pairs else {}
    for producer, consumer in edges:
        yield producer, forward_of.get(consumer, consumer)


def _check_known(
    schedule: Schedule, ops: list[Op], number: dict[Op, int], together: Mapping[Op, Sequence[int]]
) -> None:
    """Raises ScheduleError where the arrays would not describe the schedule. It is no proof: see `check`."""
    broken: tuple[Op, str] | None = None
    if len(number) + sum(len(ranks) - 1 for ranks in together.values()) < len(ops):
        twice = next(op for index, op in enumerate(ops) if number[op] != index and op not in together)
        broken = twice, "is there twice"
    registered, windows = schedule.graph.registered_of, schedule.windows
    for op in number:
        if op.kind in OF_UPDATES and (windows is None or not 0 <= op.microbatch < windows.num_ops):
            broken = op, "is an update of which the schedule says nothing"
        elif op.kind not in PRIORITY and (op.kind, op.stage) not in registered:
            broken = op, f"is of no known kind ({', '.join(sorted(PRIORITY))})"
        elif not 0 <= op.stage < schedule.num_stages:
            broken = op, f"is not in stages 0 to {schedule.num_stages - 1}"
    if broken is not None:
        raise _refused(*broken)


def _check_closed(number: dict[Op, int], edges: list[tuple[Op, Op]]) -> None:
    missing = next(((producer, consumer) for producer, consumer in edges if producer not in number), None)
    if missing is not None:
        raise _refused(missing[0], f"is missing, and {missing[1]} needs it")


def _refused(op: Op, what: str) -> ScheduleError:
    return ScheduleError(f"{op} {what} (rule: coverage); ps.check(schedule) shows where", rule="coverage", op=op)


def version_order(schedule: Schedule, bringing: Collection[Op] = ()) -> list[tuple[Op, Op]]:
    """Edges that keep the ops of a copy of a stage on their side of the copy's updates, whatever the dispatch.

    Which version of the parameters an op meets is part of the order: so runs are equal to the last bit, and what
    was proved of the mismatch stays true.

    Args:
        bringing: other ops that bring new values with them, and that ops keep on their side of, too.
    """
    if schedule.updates is None:
        return []
    edges: list[tuple[Op, Op]] = []
    for row in schedule.order:
        since: dict[tuple[int, int], list[Op]] = {}
        last: dict[tuple[int, int], Op] = {}
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            if op.kind in OF_UPDATES or op in bringing:
                edges.extend((before, op) for before in since.pop(copy, ()))
                if copy in last and not op.kind == last[copy].kind == UPDATE:  # updates need one another anyway
                    edges.append((last[copy], op))
                last[copy] = op
            else:
                since.setdefault(copy, []).append(op)
                if copy in last:
                    edges.append((last[copy], op))
    return edges
