"""The times of given orders: every op starts as soon as its row comes to it and what it needs is there.

    row 0 | 0 0 1 1         queue 2 waits for messages from queue 0, queue 1 for those from queue 3
    row 1 | 2 3 2 3         starts: 0 in row 0, then 0 and 2, then 3 and 1, ...

Whatever the order in which rows are gone through, the starts are the same, and where the rows end: no op ever takes
back that it is ready. So one sweep is a proof that orders end, or that they never do. `earliest` is the sweep, and
`Timer` runs it with the space that it works in.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np

from penstock.engine.arrays import Array, Floats, Ints, prepared, taken
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.needs import last_needed
from penstock.engine.network import Irregularities, Network


def earliest(
    p: Network,
    more: Irregularities | None,
    row: Ints,
    start: Floats,
    head: Ints,
    place: Ints,
    free: Floats,
    stack: Ints,
    waits: Ints,
) -> float:
    """Starts every op of fixed orders as soon as possible; returns the makespan (ms, with tails).

    It is -1 where the rows wait for one another.

    Args:
        p: `Network`.
        more: `Irregularities`, or None; the compiler leaves out what that has no part in.
        row: queue ids in the order of the rows' ops.
        start: out, ms, per op.
        head, place: out, how many ops of each queue ran, and the place that each row has come to.
        free: out, when each row is free (ms).
        stack, waits: working space of 2 R ints, and of R ints.
    """
    rank, op_first, row_first, duration = p.rank, p.op_first, p.row_first, p.duration
    num_rows = len(row_first) - 1
    for q in range(len(rank)):
        head[q] = 0
    for r in range(num_rows):
        place[r] = row_first[r]
        free[r] = 0.0
        stack[r] = num_rows - 1 - r
        waits[r] = 0
    depth = num_rows
    while depth > 0:
        depth -= 1
        r = stack[depth]
        waits[r] = 1
        at, end, clock = place[r], row_first[r + 1], free[r]
        while at < end:
            q = row[at]
            j = head[q]
            time = ready_time(q, j, clock, p, more, start, head)
            if more is not None and time >= 0:
                time = joined(q, r, time, p, more, row, place, free)
            if time < 0:
                break
            start[op_first[q] + j] = time
            clock = time + duration[q]
            head[q] = j + 1
            at += 1
            if more is not None:
                depth = woken(q, r, p, more, row, place, waits, stack, depth)
                continue
            after = p.message_to[q]
            if after >= 0 and head[after] == j:  # its row may stand before just this op
                other = rank[after]
                if other != r and place[other] < row_first[other + 1] and row[place[other]] == after:
                    stack[depth] = other
                    depth += 1
        place[r], free[r] = at, clock
    makespan = 0.0
    for r in range(num_rows):
        if place[r] < row_first[r + 1]:
            return -1.0
        makespan = max(makespan, free[r] + p.tail[r])
    return makespan


def ready_time(
    q: int, j: int, time: float, p: Network, more: Irregularities | None, start: Floats, head: Ints
) -> float:
    """When op `j` of queue `q` has all it needs, not before `time`; -1 where something it needs has not run."""
    before = p.message_from[q]
    if before >= 0:
        if head[before] <= j:
            return -1.0
        time = max(time, start[p.op_first[before] + j] + p.duration[before] + p.delay[q])
    before = p.local_from[q]
    if before >= 0:
        if head[before] <= j:
            return -1.0
        time = max(time, start[p.op_first[before] + j] + p.duration[before])
    if more is not None:
        for n in range(more.need_first[q], more.need_first[q + 1]):
            before, last = more.need_queue[n], last_needed(j, more.before[n], more.after[n], more.shift[n])
            if last < 0:
                continue
            if head[before] <= last:
                return -1.0
            time = max(time, start[p.op_first[before] + last] + p.duration[before] + more.need_delay[n])
    return time


def joined(
    q: int, r: int, time: float, p: Network, more: Irregularities, row: Ints, place: Ints, free: Floats
) -> float:
    """When row `r` and all others of queue `q` are free for its next op, not before `time`; -1 where one has not come
    to it. The last of its rows to come takes the others along.
    """
    for h in range(more.host_first[q], more.host_first[q + 1]):
        other = more.hosts[h]
        if other != r:
            if place[other] >= p.row_first[other + 1] or row[place[other]] != q:
                return -1.0
            time = max(time, free[other])
    for h in range(more.host_first[q], more.host_first[q + 1]):
        other = more.hosts[h]
        if other != r:
            free[other] = time + p.duration[q]
            place[other] += 1
    return time


def woken(
    q: int, r: int, p: Network, more: Irregularities, row: Ints, place: Ints, waits: Ints, stack: Ints, depth: int
) -> int:
    """Puts rows on the stack that an op of queue `q` on row `r` lets go on; returns how many stand there then."""
    for h in range(more.host_first[q], more.host_first[q + 1]):
        other = more.hosts[h]
        if other != r and waits[other] == 1:
            waits[other] = 0
            stack[depth] = other
            depth += 1
    for u in range(more.unlock_first[q], more.unlock_first[q + 1]):
        after = more.unlocks[u]
        other = p.rank[after]
        if other != r and waits[other] == 1 and place[other] < p.row_first[other + 1] and row[place[other]] == after:
            waits[other] = 0
            stack[depth] = other
            depth += 1
    return depth


@dataclass(frozen=True)
class OrderTimes:
    """When orders run.

    Attributes:
        start: of each op, ms; 0 where it never runs.
        reached: how many places of each row were reached: all, or those before which the rows wait for one another.
        makespan: ms until the last row has ended, tails counted; -1 where some never do.
    """

    start: Array
    reached: list[int]
    makespan: float

    @property
    def complete(self) -> bool:
        """Whether every op has run."""
        return self.makespan >= 0


class Timer:
    """Times orders of one network, one after the other.

    Args:
        compile: whether as C; by default where that can be had.
    """

    def __init__(
        self, network: Network, irregular: Irregularities | None = None, compile: bool | None = None
    ) -> None:
        self._as_c = is_compiled() if compile is None else compile
        self._network = prepared(network, self._as_c)
        self._irregular = None if irregular is None else prepared(irregular, self._as_c)
        own = sys.modules[__name__]
        self._sweep: ModuleType = compiled(own) if self._as_c else own
        self._num_queues, self._num_ops = len(network.rank), network.num_ops

    def time(self, row: Array, duration: Array | None = None) -> OrderTimes:
        """Times orders.

        Args:
            row: of each place of the rows, the queue whose next op runs there.
            duration: ms of each queue's ops, an array; those of the network where not given.
        """
        space = self._new_space()
        makespan = self._earliest(row, duration, space)
        reached = np.asarray(space[2]) - np.asarray(self._network.row_first)[:-1]
        return OrderTimes(space[0], reached.tolist(), makespan)

    def makespan(self, row: Array, duration: Array | None = None) -> float:
        """The makespan alone, in space that is used again; args as of `time`."""
        return self._earliest(row, duration, self._space)

    def _earliest(self, row: Array, duration: Array | None, space: list[Array]) -> float:
        network = self._network
        if duration is not None:
            network = network._replace(duration=taken(duration, np.float64, self._as_c))
        return float(self._sweep.earliest(network, self._irregular, taken(row, np.int64, self._as_c), *space))

    @cached_property
    def _space(self) -> list[Array]:
        return self._new_space()

    def _new_space(self) -> list[Array]:
        """What the sweep writes: starts, then what it works in."""
        num_rows, ints = self._network.num_ranks, np.int64
        sizes = (self._num_ops, float), (self._num_queues, ints), (num_rows, ints), (num_rows, float)
        space: list[Array] = [np.zeros(*each) for each in (*sizes, (2 * num_rows, ints), (num_rows, ints))]
        return space if self._as_c else [each.tolist() for each in space]
