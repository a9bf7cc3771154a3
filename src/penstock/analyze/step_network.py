"""A step of a recorded run as a network of the engine: what each op waited for, and how long each took by itself.

    rank 1     | ag |F0 F1 .. B31| arrive | all together | reduce | ...     a row of the worker
    link 0>1        F0 F1 ..                                                a row of the link: messages in order
    stream of 1     reduce 0, reduce 1                                      collectives that run beside the compute

An op that several ranks record for one microbatch of a stage is run by them together, as a collective is.

A message begins when its sender has computed it and its receiver has posted it, and a collective when the last member
has come. What it takes from there on is its own; all before was waiting, and is not counted as its time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.analyze.whole import StepTable
from penstock.engine.network import Array, of_queues
from penstock.engine.timing import OrderTimes, Timer
from penstock.formats.traces.op_names import PARAMETERS
from penstock.formats.traces.run_trace import NONE, Scope, TraceError


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages between ranks of a step: L of them.

    Attributes:
        producer, consumer: ops of the step that made and needed each, (L,).
        send, receive: ops that recorded its ends; NONE where none did.
        own: ms that each took by itself, (K, L).
        posted: the op after which its receiver waits for it; NONE where any number may be under way.
    """

    producer: Array
    consumer: Array
    send: Array
    receive: Array
    own: Array
    posted: Array

    @property
    def recorded(self) -> bool:
        return bool((self.receive != NONE).any())


class StepNetwork:
    """The network of those steps of a trace in which ranks ran their ops in one order.

    Queues hold one op each: compute and local ops, what a worker does until a collective begins (its arrival), the
    beginning of collectives, the members' own time in them, and messages.

    Attributes:
        steps: which of the K, in order.
        op, message: of each queue, the op of the step whose own time it takes, or the message; NONE for others.
        arrival: of each queue, the op whose coming it is; NONE for others.
        needs: of each queue, those that must have ended; besides what the rows say.
        hosts: of each queue, its rows.
    """

    def __init__(self, table: StepTable, messages: Messages, steps: Array) -> None:
        self.steps = steps
        self.op: Array
        self._ops: list[int] = []
        self._messages: list[int] = []
        self._arrivals: list[int] = []
        self.needs: list[list[int]] = []
        self.hosts: list[tuple[int, ...]] = []
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self._lay_out(table, messages)
        self.op = np.array(self._ops)
        self.message = np.array(self._messages)
        self.arrival = np.array(self._arrivals)
        num_rows = max(self._rows) + 1
        self.row_first = np.concatenate([[0], np.cumsum([len(self._rows[row]) for row in range(num_rows)])])
        self.row = np.array([queue for row in range(num_rows) for queue in self._rows[row]])
        network, irregular = of_queues(
            [1] * len(self._ops),
            [0.0] * len(self._ops),
            self.hosts,
            [[(before, 0.0, 1, 1) for before in needs] for needs in self.needs],
            num_rows,
        )
        self._timer = Timer(network, irregular, compile=True)
        self._table = table

    def durations(self, own: Array, messages: Array) -> Array:
        """Ms of each queue from those of ops (M,) and of messages (L,)."""
        found = np.zeros(len(self.op))
        has, sent = self.op != NONE, self.message != NONE
        found[has] = own[self.op[has]]
        found[sent] = messages[self.message[sent]]
        return found

    def time(self, durations: Array) -> OrderTimes:
        """When all begins.

        Raises:
            TraceError: ranks would wait for one another; then the order of ops is not what ran.
        """
        timed = self._timer.time(self.row, durations)
        if not timed.complete:
            row = next(r for r, reached in enumerate(timed.reached) if reached < len(self._rows[r]))
            queue = self._rows[row][timed.reached[row]]
            op = max(self.op[queue], self.arrival[queue])
            what = self._table.named(int(op)) if op != NONE else "a message"
            raise TraceError(
                f"{self._table.trace.name}, step {int(self._table.steps[self.steps[0]])}: by the order of ops {what} "
                "waits for what waits for it; do the clocks of hosts differ, or is a rank's file from another run?"
            )
        return timed

    def predecessors(self) -> list[list[int]]:
        """Of each queue, all that it waits for: its needs, and what its rows run before it."""
        found = [list(needs) for needs in self.needs]
        for row in self._rows.values():
            for before, after in itertools.pairwise(row):
                found[after].append(before)
        return found

    def _lay_out(self, table: StepTable, messages: Messages) -> None:
        start = table.start[self.steps[0]]
        compute = table.is_scope(Scope.COMPUTE)
        message = table.is_scope(Scope.SEND, Scope.RECEIVE)
        replicas = table.is_scope(Scope.REPLICAS)
        num_ranks = table.trace.num_ranks
        worker = table.replica * num_ranks + table.rank
        num_workers = table.trace.num_replicas * num_ranks
        last = np.full(num_workers, -np.inf)
        np.maximum.at(last, worker[compute], table.start[self.steps[0]][compute])
        beside = replicas & (start < last[worker])
        group = groups(table)
        own_queue = np.full(table.num_ops, NONE)
        begin_queue = np.full(table.num_ops, NONE)
        by_row: defaultdict[int, list[int]] = defaultdict(list)
        order = np.lexsort((table.number, table.kind, start))
        for op in order[~message[order]].tolist():
            by_row[int(worker[op]) + (num_workers if beside[op] else 0)].append(op)
        members: defaultdict[int, list[int]] = defaultdict(list)
        for op in np.flatnonzero(group != NONE).tolist():
            members[int(group[op])].append(op)
        row_of = {op: row for row, ops in by_row.items() for op in ops}
        gang_of = {
            group: self._queue(tuple(sorted({row_of[op] for op in ops}))) for group, ops in sorted(members.items())
        }
        for row, ops in sorted(by_row.items()):
            for op in ops:
                if group[op] == NONE:
                    own_queue[op] = begin_queue[op] = self._add(row, op=op)
                    continue
                begin_queue[op] = self._add(row, arrival=op)
                self._rows[row].append(gang_of[int(group[op])])
                own_queue[op] = self._add(row, op=op)
        self._join_streams(table, by_row, num_workers, start, compute, own_queue, begin_queue)
        self._send(table, messages, start, own_queue, begin_queue, 2 * num_workers)

    def _queue(self, rows: tuple[int, ...], op: int = NONE, message: int = NONE, arrival: int = NONE) -> int:
        self._ops.append(op)
        self._messages.append(message)
        self._arrivals.append(arrival)
        self.needs.append([])
        self.hosts.append(rows)
        return len(self._ops) - 1

    def _add(self, row: int, op: int = NONE, message: int = NONE, arrival: int = NONE) -> int:
        queue = self._queue((row,), op, message, arrival)
        self._rows[row].append(queue)
        return queue

    def _join_streams(
        self,
        table: StepTable,
        by_row: dict[int, list[int]],
        num_workers: int,
        start: Array,
        compute: Array,
        own_queue: Array,
        begin_queue: Array,
    ) -> None:
        """What runs beside the compute waits for its stage's last op, or its stage's first op waits for it."""
        names = np.array([kind.name for kind in table.trace.kinds])[table.kind]
        for worker in range(num_workers):
            stream = by_row.get(num_workers + worker, [])
            if not stream:
                continue
            row = by_row[worker]
            computed = [op for op in row if compute[op]]
            for op in stream:
                known = [each for each in computed if table.stage[op] in (NONE, table.stage[each])]
                if names[op] == PARAMETERS or start[op] < start[computed[0]]:
                    if known:
                        self.needs[begin_queue[known[0]]].append(int(own_queue[op]))
                    continue
                if table.stage[op] == NONE:
                    known = [each for each in computed if start[each] < start[op]]
                if known:
                    self.needs[begin_queue[op]].append(int(own_queue[known[-1]]))
            after = [op for op in row if start[op] > start[computed[-1]]]
            if after:
                self.needs[begin_queue[after[0]]].append(int(own_queue[stream[-1]]))

    def _send(
        self,
        table: StepTable,
        messages: Messages,
        start: Array,
        own_queue: Array,
        begin_queue: Array,
        first_row: int,
    ) -> None:
        """Messages in a row for each link and kind where both ends were recorded, else each in a row of its own."""
        letters = table.letters()
        rows: dict[tuple[int, ...] | int, int] = {}
        begins = np.where(messages.receive != NONE, start[messages.receive], start[messages.consumer])
        for place in np.lexsort((begins,)).tolist():
            producer, consumer = int(messages.producer[place]), int(messages.consumer[place])
            key: tuple[int, ...] | int = place
            if messages.receive[place] != NONE:
                key = (
                    int(table.replica[consumer]),
                    int(table.rank[producer]),
                    int(table.rank[consumer]),
                    int(letters[producer] == "F"),
                )
            row = rows.setdefault(key, first_row + len(rows))
            queue = self._add(row, message=place)
            self.needs[queue].append(int(own_queue[producer]))
            if messages.posted[place] != NONE:
                self.needs[queue].append(int(own_queue[messages.posted[place]]))
            self.needs[begin_queue[consumer]].append(queue)


def groups(table: StepTable) -> Array:
    """The collective, or op of ranks that share its stage, that each op is a member of.

    NONE where it is none, or its only member.
    """
    found = np.full(table.num_ops, NONE)
    joined: dict[tuple[int, ...], list[int]] = {}
    together = table.is_scope(Scope.REPLICAS, Scope.PIPELINE, Scope.ALL, Scope.COMPUTE)
    for op in np.flatnonzero(together).tolist():
        key = table.keys[op]
        where = {
            Scope.REPLICAS: (0, key.rank, key.stage),
            Scope.PIPELINE: (1, key.replica, 0),
            Scope.COMPUTE: (3, key.replica, key.stage, key.microbatch),
        }.get(table.trace.kinds[key.kind].scope, (2, 0, 0))
        joined.setdefault((*where, key.kind, key.number), []).append(op)
    for number, members in enumerate(joined.values()):
        if len(members) > 1:
            found[members] = number
    return found


def own_times(table: StepTable) -> Array:
    """Ms that each op took by itself, waiting for others left out, (K, M)."""
    own = table.end - table.start
    group = groups(table)
    for number in np.unique(group[group != NONE]).tolist():
        members = np.flatnonzero(group == number)
        came = table.start[:, members].max(axis=1, keepdims=True)
        own[:, members] = np.maximum(table.end[:, members] - came, 0.0)
    return own


def networks(table: StepTable, messages: Messages) -> list[StepNetwork]:
    """One for all steps in which ranks ran their ops in the same order; most traces have one."""
    recorded = np.flatnonzero(~table.is_scope(Scope.SEND, Scope.RECEIVE))
    group = table.replica[recorded] * table.trace.num_ranks + table.rank[recorded]
    alike: defaultdict[bytes, list[int]] = defaultdict(list)
    compute = table.is_scope(Scope.COMPUTE)[recorded]
    for step in range(len(table.steps)):
        # Where no time passes between ops their order is that of the table.
        order = np.lexsort((table.start[step, recorded], group))
        alike[recorded[order][compute[order]].tobytes()].append(step)
    return [StepNetwork(table, messages, np.array(steps)) for steps in alike.values()]
