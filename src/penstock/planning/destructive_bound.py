"""A lower bound by refutation: no order is over by a time for which the windows of some op close.

The time is found by bisection, between a bound that is known and the makespan of some order (a destructive bound:
Klein and Scholl 1999). For each time tried it is narrowed when each op can start and end. A rank passes through
states: how many ops of each of its queues it has run. It may go from one to the next where what the op needs on this
rank has run, and what it takes fits under the cap:

    F I W run   3 0 0 ->  3 1 0  ->  3 1 1  ->  4 1 1         cap 3, I and W free a half each
                                 ->  3 2 0  ->  4 2 0         the fourth F waits for two of them, whichever

The rank runs one op at a time, so the earliest moment at which it can be in a state follows from those before it, and
the latest from those behind it. An op starts between some state and the next: no earlier, and no later, than the best
of all of these. What that says goes on to other ranks by messages, and so on until nothing changes. Where no way is
left for some op, no order is over by that time.

What a rank can do alone is exact here, with its cap and both its ends. What is lost is that one order of a rank makes
an op early and another makes it late: other ranks may assume both.

`narrowed` and `refuted` are written to be compiled.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Flags, Floats, IntRows, Ints, Stop
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.network import Array, Network
from penstock.engine.tolerance import EPSILON, slack
from penstock.planning.bounds import heads_and_tails, own_tails
from penstock.planning.problem import Problem

_MOST_STATES, _MOST_STATES_UNCOMPILED = 1_000_000, 2_000
"""States of a rank above which nothing is refuted."""
_NUM_SWEEPS = 60
"""How often a time is tried on all ranks."""
_TOLERANCE = 1e-5
"""Share of the makespan by which a window must change for other ranks to look at it again."""
_CLOSE = 1e-6
"""Share of the makespan to which the time is found at least."""


def states_of(network: Network, most: int, stop: Array) -> RankStates | None:
    """The states of all ranks; None where one has more than `most`, or `stop` was set."""
    num_ranks = network.num_ranks
    width = int(np.diff(network.rank_first).max(initial=0))
    tables: dict[bytes, tuple[int, int]] = {}
    counts: list[Array] = []
    following: list[Array] = []
    total = 0
    spans = np.zeros((num_ranks, 2), np.int64)
    for r in range(num_ranks):
        mine = slice(int(network.rank_first[r]), int(network.rank_first[r + 1]))
        before = np.stack([network.message_from[mine], network.local_from[mine]]) - mine.start
        before[(before < 0) | (before >= mine.stop - mine.start)] = -1
        rank = (network.size[mine], before, network.memory[mine], network.cap[r : r + 1])
        key = b"".join(array.tobytes() for array in rank)
        if key not in tables:
            made = _passed_through(*rank, most, stop)
            if made is None:
                return None
            tables[key] = total, total + len(made[0])
            total += len(made[0])
            for found, each in ((counts, made[0]), (following, made[1])):
                found.append(np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1))
        spans[r] = tables[key]
    empty = np.empty((0, width), np.int64)
    return RankStates(
        spans[:, 0].copy(), spans[:, 1].copy(), np.concatenate([empty, *counts]), np.concatenate([empty, *following])
    )


def _passed_through(
    size: Array, before: Array, memory: Array, cap: Array, most: int, stop: Array
) -> tuple[Array, Array] | None:
    """The states of one rank, in the order of how much has run, and those behind each op of theirs.

    Args:
        before: two rows, per queue one of the same rank whose op of the same number must have run, -1 for none.
    """
    num_queues, limit = len(size), cap[0] * (1 + EPSILON)
    radix = np.cumprod(np.concatenate([[1], size + 1]))[:-1]  # empty for a rank that hosts no stage
    layer = np.zeros((1, num_queues), np.int64)
    counts, following, reached = [], [], 0
    for _ in range(int(size.sum()) + 1):
        reached += len(layer)
        if reached > most or stop[0] != 0:
            return None
        held, codes = layer @ memory, layer @ radix
        may = layer < size
        for row in before:
            for k in np.flatnonzero(row >= 0):
                may[:, k] &= layer[:, k] < layer[:, row[k]]
        for k in np.flatnonzero(memory > 0):
            may[:, k] &= held + memory[k] <= limit
        further = codes[:, None] + radix
        found = np.unique(further[may])
        to = np.full(layer.shape, -1, np.int64)
        to[may] = reached + np.searchsorted(found, further[may])
        counts.append(layer)
        following.append(to)
        layer = found[:, None] // radix % (size + 1)
    return np.concatenate(counts), np.concatenate(following)


class DestructiveBound:
    """The search for the longest time that can be refuted.

    Args:
        known: a lower bound (ms).
        makespan: that of some order (ms), above which nothing is tried.
        closeness: how far from that a bound is as good, as a share of it.
    """

    def __init__(self, problem: Problem, known: float, makespan: float, closeness: float = 0.0) -> None:
        self._problem, self._makespan, self._closeness = problem, makespan, max(_CLOSE, closeness / 4)
        self.bound = known
        """The longest time (ms) that was refuted so far, or what was known."""

    def go(self, stop: Array) -> None:
        """Raises the bound, to the end or until the one number of `stop` is no longer 0."""
        problem, queues = self._problem, self._problem.queues
        most = _MOST_STATES if is_compiled() else _MOST_STATES_UNCOMPILED
        states = states_of(queues, most, stop)
        if states is None:
            return
        head, tail = heads_and_tails(problem, work=True)
        tail = own_tails(queues, tail)
        most = int((states.table_last - states.table_first).max(initial=0))
        room = (*np.empty((2, most)), *np.empty((2, queues.num_ops)), np.empty(queues.num_ranks, np.bool_))
        refuted, high = compiled(sys.modules[__name__]).refuted, self._makespan
        while high > self.bound * (1 + self._closeness) and stop[0] == 0:
            middle = (self.bound + high) / 2
            ms = _TOLERANCE * middle, slack(middle)
            if refuted(queues, states, _NUM_SWEEPS, *ms, OpWindows(head.copy(), middle - tail, *room), stop):
                self.bound = middle
            else:
                high = middle


NEVER = 1e300


class RankStates(NamedTuple):
    """The states that each rank can pass through.

    Attributes:
        table_first, table_last: rank r has the states `table_first[r]` to `table_last[r] - 1`; ranks may share some.
        counts: of each state, how many ops of each queue of the rank have run; a rank's first state is that of none,
            its last that of all.
        following: of each state and queue, the state behind that queue's next op, -1 where it may not run.
    """

    table_first: Ints
    table_last: Ints
    counts: IntRows
    following: IntRows


class OpWindows(NamedTuple):
    """When ops may run, and working space.

    Attributes:
        head, deadline: per op, ms before which it can't start, and at which it must have ended.
        early, late: room for a number per state of a rank; first_start, last_end: per op. dirty: per rank, a flag.
    """

    head: Floats
    deadline: Floats
    early: Floats
    late: Floats
    first_start: Floats
    last_end: Floats
    dirty: Flags


def narrowed(p: Network, r: int, counts: IntRows, following: IntRows, slack: float, w: OpWindows) -> bool:
    """Narrows the windows of rank r's ops as far as the rank itself says; False where one of them has none left.

    Args:
        counts, following: of the states of the rank, see `RankStates`.
        slack: ms that an op may be late by rounding.
        w: head and deadline are in and out.
    """
    head, deadline, early, late = w.head, w.deadline, w.early, w.late
    first_start, last_end = w.first_start, w.last_end
    first, last = p.rank_first[r], p.rank_first[r + 1]
    num_states = len(counts)
    for s in range(num_states):
        early[s] = NEVER
        late[s] = -NEVER
    for o in range(p.op_first[first], p.op_first[last]):
        first_start[o] = NEVER
        last_end[o] = -NEVER
    early[0] = 0.0
    for s in range(num_states):
        if early[s] >= NEVER:
            continue
        for q in range(first, last):
            to = following[s, q - first]
            if to >= 0:
                op = p.op_first[q] + counts[s, q - first]
                end = max(early[s], head[op]) + p.duration[q]
                if end < early[to] and end <= deadline[op] + slack:
                    early[to] = end
    if early[num_states - 1] >= NEVER:
        return False
    late[num_states - 1] = NEVER
    for s in range(num_states - 1, -1, -1):
        if early[s] >= NEVER:
            continue
        for q in range(first, last):
            to = following[s, q - first]
            if to < 0 or late[to] == -NEVER:
                continue
            op = p.op_first[q] + counts[s, q - first]
            begin, end = max(early[s], head[op]), min(late[to], deadline[op])
            if begin + p.duration[q] <= end + slack:
                late[s] = max(late[s], end - p.duration[q])
                first_start[op] = min(first_start[op], begin)
                last_end[op] = max(last_end[op], end)
    for o in range(p.op_first[first], p.op_first[last]):
        if first_start[o] >= NEVER:
            return False
        head[o] = max(head[o], first_start[o])
        deadline[o] = min(deadline[o], last_end[o])
    return True


def refuted(
    p: Network, states: RankStates, num_sweeps: int, tolerance: float, slack: float, w: OpWindows, stop: Stop
) -> bool:
    """Whether no order keeps to the windows, which are narrowed on the way.

    Args:
        num_sweeps: how often to go through the ranks, at most.
        tolerance: a change by less (ms) is not passed on alone.
        slack: ms that an op may be late by rounding.
        stop: its one number is set where this is to come to its end.
    """
    head, deadline, dirty = w.head, w.deadline, w.dirty
    num_ranks = len(states.table_first)
    for r in range(num_ranks):
        dirty[r] = True
    for sweep in range(num_sweeps):
        going = False
        for at in range(num_ranks):
            r = at if sweep % 2 == 0 else num_ranks - 1 - at
            if not dirty[r]:
                continue
            if stop[0] != 0:
                return False
            dirty[r] = False
            a, b = states.table_first[r], states.table_last[r]
            if not narrowed(p, r, states.counts[a:b], states.following[a:b], slack, w):
                return True
            for q in range(p.rank_first[r], p.rank_first[r + 1]):
                after, before = p.message_to[q], p.message_from[q]
                for j in range(p.size[q]):
                    op = p.op_first[q] + j
                    if after >= 0 and p.rank[after] != r:
                        other = p.op_first[after] + j
                        time = head[op] + p.duration[q] + p.delay[after]
                        if time > head[other]:
                            if time > head[other] + tolerance:
                                dirty[p.rank[after]] = going = True
                            head[other] = time
                    if before >= 0 and p.rank[before] != r:
                        other = p.op_first[before] + j
                        time = deadline[op] - p.duration[q] - p.delay[q]
                        if time < deadline[other]:
                            if time < deadline[other] - tolerance:
                                dirty[p.rank[before]] = going = True
                            deadline[other] = time
        if not going:
            return False
    return False
