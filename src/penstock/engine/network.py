"""The one form in which orders are planned and timed: queues of ops, what waits for what, the rows that run them.

A queue is one kind of op of one stage in one pipeline. Within a stage each kind of op runs in one order of
microbatches. That loses nothing, by an exchange argument: two ops of a kind that run out of order can swap places
without delaying any other. So the state of a queue is a count, needs are said between queues, once for all of their
ops, and a row (a rank's order, or that of its asynchronous stream) is a sequence of queues:

    queue    0 1 2 | 3 4 5        F I W of stage 0 | F I W of stage 1
    row of rank 0 | 0 0 1 2 0 1 2 1 2        that is F0 F1 I0 W0 F2 I1 W1 I2 W2

Regular is a queue in one row that waits for at most two others, one op for the op of the same number: a message from
another stage, and the op before it on its own. All else is said beside it (`Irregularities`): several messages,
windows of ops that unlock windows, ops that stand in several rows at once. What has no order in common is queues of
one op each.

Time can be turned round: the same arrays, with before and after exchanged, pose the problem of running everything
backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Array, Floats, Ints

NONE = -1


class Network(NamedTuple):
    """The arrays that all functions of the engine take. Q queues over R rows, n ops.

    Attributes:
        rank: the row of each queue; the first of several.
        op_first: queue q has ops `op_first[q]` to `op_first[q + 1] - 1`.
        row_first: row r has places `row_first[r]` to `row_first[r + 1] - 1` in a row of all rows' orders.
        duration: ms of each queue's ops.
        message_from, delay: the queue on another stage whose op it needs, and ms until that op's message is there.
        local_from: the queue on its own stage whose op it needs.
        message_to, local_to: the same seen from the other side; `delay_to` is the delay towards `message_to`.
        tail: ms that count after each row's last op, and `release`, ms before it may start: 0 but where the span
            matters.
        size: ops of each queue. Like those below it is there in problems that are to be planned.
        pipeline: of each queue.
        rank_first: rank r has queues `rank_first[r]` to `rank_first[r + 1] - 1`.
        memory: what an op adds to (at its start) or takes from (at its end) what its rank holds.
        cap: most that each rank may hold.
    """

    rank: Ints
    op_first: Ints
    row_first: Ints
    duration: Floats
    message_from: Ints
    delay: Floats
    local_from: Ints
    message_to: Ints
    tail: Floats
    size: Ints = None
    pipeline: Ints = None
    rank_first: Ints = None
    memory: Floats = None
    delay_to: Floats = None
    local_to: Ints = None
    cap: Floats = None
    release: Floats = None

    @property
    def num_ranks(self) -> int:
        return len(self.row_first) - 1

    @property
    def num_ops(self) -> int:
        return int(self.op_first[-1])

    def turned(self) -> Network:
        """The problem with time turned round: op j of a queue is its op size - 1 - j; what freed memory takes it."""
        return self._replace(
            memory=-self.memory,
            message_from=self.message_to,
            delay=self.delay_to,
            local_from=self.local_to,
            message_to=self.message_from,
            delay_to=self.delay,
            local_to=self.local_from,
            release=self.tail,
            tail=self.release,
        )


class Irregularities(NamedTuple):
    """What is not regular in a network.

    Attributes:
        need_first: queue q has needs `need_first[q]` to `need_first[q + 1] - 1`, besides those of the network.
        need_queue, need_delay: of each need, the queue whose op must have ended, and ms until what it made is there.
        before, after: of each need, how many ops of `need_queue` unlock how many of the queue.
        shift: of each need, how much later, or where below 0 earlier, the op of `need_queue` is than these say: with
            -1 an op needs the one before. Ops below number 0 are needed by none.
        unlock_first, unlocks: who waits for queue q, for a message of the network or by such a need:
            `unlocks[unlock_first[q]:unlock_first[q + 1]]`.
        host_first, hosts: queue q stands in the rows `hosts[host_first[q]:host_first[q + 1]]`, in all at once; none
            where it stands in its own alone.
    """

    need_first: Ints
    need_queue: Ints
    need_delay: Floats
    before: Ints
    after: Ints
    shift: Ints
    unlock_first: Ints
    unlocks: Ints
    host_first: Ints
    hosts: Ints


class OpNetwork(NamedTuple):
    """Ops of rows in their order, as ranks choose among them. Row r has ops `first[r]` to `first[r + 1] - 1`.

    Attributes:
        rank: the row of each op: its rank, or the number of ranks plus its rank where it is on that rank's stream.
        num_needed: how many edges lead to each op.
        edge_first, edge_to: the ops that need op o are `edge_to[edge_first[o]:edge_first[o + 1]]`.
        queue_first, queue_ops, queue_of: queue q (one stage and one priority of one row) holds the ops
            `queue_ops[queue_first[q]:queue_first[q + 1]]`, in the order of the row.
        queue_rank_first: row r has queues `queue_rank_first[r]` to `queue_rank_first[r + 1] - 1`.
        priority: of each op, 1 for forwards; lower numbers go first where a rank prefers by class.
        place: where each op stands in the order of its rank, those of the rank's stream among the others.
        gang: the gang of each op, which several ranks run together or which runs in its turn alone; -1 for others.
        gang_first, gang_ops: gang g has the ops `gang_ops[gang_first[g]:gang_first[g + 1]]`.
    """

    rank: Ints
    first: Ints
    num_needed: Ints
    edge_first: Ints
    edge_to: Ints
    queue_rank_first: Ints
    queue_first: Ints
    queue_ops: Ints
    queue_of: Ints
    priority: Ints
    place: Ints
    gang: Ints
    gang_first: Ints
    gang_ops: Ints


class OpGraph(NamedTuple):
    """Ops numbered row by row, in the order of the rows, and what waits for what.

    Attributes:
        row_first: row r has ops `row_first[r]` to `row_first[r + 1] - 1`.
        row_of: of each op.
        producer, consumer: what needs what. On one row the order says it already, unless it is wrong.
        delay: of each of these pairs, ms until what was made is there, between rows; None where it is there at once.
        together: op -> the one that stands for it where several rows run one op at once, itself elsewhere; None
            where no row does.
    """

    row_first: Array
    row_of: Array
    producer: Array
    consumer: Array
    delay: Array = None
    together: Array = None

    @property
    def row(self) -> Array:
        """The queue that runs at each place of the rows."""
        return np.arange(len(self.row_of)) if self.together is None else self.together

    def turned(self) -> OpGraph:
        """The same with time turned round: op o is number n - 1 - o, and row r row R - 1 - r."""
        last = len(self.row_of) - 1
        return OpGraph(
            last + 1 - self.row_first[::-1],
            len(self.row_first) - 2 - self.row_of[::-1],
            last - self.consumer,
            last - self.producer,
            self.delay,
            None if self.together is None else last - self.together[::-1],
        )

    def network(self, duration: Array | None = None) -> tuple[Network, Irregularities | None]:
        """A network of queues of one op each, of `duration` ms; by default they take no time."""
        row_of, producer, consumer, num_ops = self.row_of, self.producer, self.consumer, len(self.row_of)
        asked = np.flatnonzero((row_of[producer] != row_of[consumer]) | (producer >= consumer))
        producer, consumer = producer[asked], consumer[asked]
        delay = np.zeros(len(asked)) if self.delay is None else self.delay[asked]
        if self.together is not None:
            producer, consumer = self.together[producer], self.together[consumer]
        message_from, message_to = np.full((2, num_ops), NONE, np.int64)
        alone = (np.bincount(producer, minlength=num_ops)[producer] == 1) & (
            np.bincount(consumer, minlength=num_ops)[consumer] == 1
        )
        message_from[consumer[alone]] = producer[alone]
        message_to[producer[alone]] = consumer[alone]
        message_delay = np.zeros(num_ops)
        message_delay[consumer[alone]] = delay[alone]
        network = Network(
            rank=row_of,
            op_first=np.arange(num_ops + 1),
            row_first=self.row_first,
            duration=np.zeros(num_ops) if duration is None else duration,
            message_from=message_from,
            delay=message_delay,
            local_from=np.full(num_ops, NONE, np.int64),
            message_to=message_to,
            tail=np.zeros(len(self.row_first) - 1),
        )
        if alone.all() and self.together is None:
            return network, None
        by_consumer = np.flatnonzero(~alone)[np.argsort(consumer[~alone], kind="stable")]
        one = np.ones(len(by_consumer), np.int64)
        host_first, hosts = np.zeros(num_ops + 1, np.int64), np.zeros(0, np.int64)
        if self.together is not None:
            several = np.flatnonzero(np.bincount(self.together, minlength=num_ops)[self.together] > 1)
            several = several[np.argsort(self.together[several], kind="stable")]
            host_first, hosts = starts_of(self.together[several], num_ops), row_of[several]
        irregular = Irregularities(
            need_first=starts_of(consumer[by_consumer], num_ops),
            need_queue=producer[by_consumer],
            need_delay=delay[by_consumer],
            before=one,
            after=one,
            shift=np.zeros(len(one), np.int64),
            unlock_first=starts_of(producer, num_ops),
            unlocks=consumer[np.argsort(producer, kind="stable")],
            host_first=host_first,
            hosts=hosts,
        )
        return network, irregular


def of_queues(
    size: Sequence[int],
    duration: Sequence[float],
    hosts: Sequence[Sequence[int]],
    needs: Sequence[Sequence[tuple[int, float, int, int] | tuple[int, float, int, int, int]]],
    num_rows: int,
) -> tuple[Network, Irregularities]:
    """A network whose needs are all said beside it, as lists.

    Args:
        size, duration, hosts: of each queue, how many ops, ms of one, and the rows it stands in.
        needs: of each queue, (queue, delay, before, after) of all that it needs, and a shift where there is one.
    """
    num_queues, lengths = len(size), [0] * num_rows
    unlocks: list[list[int]] = [[] for _ in size]
    for q, found in enumerate(needs):
        for row in hosts[q]:
            lengths[row] += size[q]
        for need in found:
            unlocks[need[0]].append(q)
    none = [NONE] * num_queues
    network = Network(
        rank=[rows[0] for rows in hosts],
        op_first=list(accumulate(size, initial=0)),
        row_first=list(accumulate(lengths, initial=0)),
        duration=list(duration),
        message_from=none,
        delay=[0.0] * num_queues,
        local_from=none,
        message_to=none,
        tail=[0.0] * num_rows,
    )
    queue, delay, before, after, shift = ([(*need, 0)[n] for found in needs for need in found] for n in range(5))
    irregular = Irregularities(
        list(accumulate(map(len, needs), initial=0)),
        queue,
        delay,
        before,
        after,
        shift,
        list(accumulate(map(len, unlocks), initial=0)),
        list(chain.from_iterable(unlocks)),
        list(accumulate(map(len, hosts), initial=0)),
        list(chain.from_iterable(hosts)),
    )
    return network, irregular


def starts_of(group: Array, num_groups: int) -> Array:
    """Where each group begins once its members stand together; one entry more than groups."""
    first = np.zeros(num_groups + 1, np.int64)
    np.cumsum(np.bincount(group, minlength=num_groups), out=first[1:])
    return first
