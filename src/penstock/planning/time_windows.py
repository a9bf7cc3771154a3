"""Narrows when each op can start and end in orders that are over by a given time.

A rank passes through states: how many ops of each of its queues it has run. It may go from one to the next where what
the op needs on this rank has run, and what it takes fits under the cap:

    F I W run   3 0 0 ->  3 1 0  ->  3 1 1  ->  4 1 1         cap 3, I and W free a half each
                                 ->  3 2 0  ->  4 2 0         the fourth F waits for two of them, whichever

The rank runs one op at a time, so the earliest moment at which it can be in a state follows from those before it, and
the latest from those behind it. An op starts between some state and the next: no earlier, and no later, than the best
of all of these. What that says goes on to other ranks by messages, and so on until nothing changes. Where no way is
left for some op, no order is over by that time.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.arrays import Flags, Floats, IntRows, Ints, Stop
from penstock.engine.network import Network

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
