"""List scheduling over the arrays of a `Network`.

`list_ops` goes from event to event: the rank that can start something first picks, among the ops it could start
then, the one of least value. With `wait[r]` above 0 the rank may also pick an op that becomes ready within so many
ms, and stands idle till then: greedy never waits, and what it starts instead can block the better op for longer.

Memory never ends in a deadlock: see `memory_safety.can_finish`.

`list_by_rules` is the other list scheduler, for what has rules and not a number for each op; it says where they part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Floats, Ints
from penstock.engine.memory_safety import can_finish
from penstock.engine.min_tree import fill, least_of, leaves_for, sift
from penstock.engine.network import Network
from penstock.engine.tolerance import EPSILON

INFINITE = 1e300


class ListSpace(NamedTuple):
    """What list scheduling reads and writes besides the network: one for each thread.

    Attributes:
        values: in, per op, least first. wait: in, per rank, ms.
        start: out, per op. row: out, queue ids in the order of the ranks' ops.
        state, times: working space of Q + 2 R ints and Q + 3 R + 2 * (power of two >= R) floats.
    """

    values: Floats
    wait: Floats
    start: Floats
    row: Ints
    state: Ints
    times: Floats

    @classmethod
    def of(cls, network: Network) -> ListSpace:
        num_ops, num_ranks, num_queues = network.num_ops, network.num_ranks, len(network.rank)
        return cls(
            values=np.empty(num_ops),
            wait=np.zeros(num_ranks),
            start=np.empty(num_ops),
            row=np.empty(num_ops, np.int64),
            state=np.empty(num_queues + 2 * num_ranks, np.int64),
            times=np.empty(num_queues + 3 * num_ranks + 2 * leaves_for(num_ranks)),
        )


def list_ops(p: Network, space: ListSpace, turned: bool, in_turn: bool) -> float:
    """Schedules every op; returns the makespan (ms, with tails), or -1 where the ranks are stuck.

    Args:
        p: `Network`. space: `ListSpace`.
        turned: op j of a queue is number size - 1 - j in `values` and `start`.
        in_turn: what takes memory on a rank does so in the order of its values, however early it is ready.
    """
    values, wait, start, row, state, times = space
    rank, pipeline, rank_first, count, op_first = p.rank, p.pipeline, p.rank_first, p.size, p.op_first
    duration, memory, cap = p.duration, p.memory, p.cap
    message_from, delay, local_from = p.message_from, p.delay, p.local_from
    message_to, local_to = p.message_to, p.local_to
    num_queues, num_ranks = len(rank), len(cap)
    head, placed, several = state[:num_queues], state[num_queues : num_queues + num_ranks], state[-num_ranks:]
    ready = times[:num_queues]
    free = times[num_queues : num_queues + num_ranks]
    held = times[num_queues + num_ranks : num_queues + 2 * num_ranks]
    limit = times[num_queues + 2 * num_ranks : num_queues + 3 * num_ranks]
    leaves = leaves_for(num_ranks)
    tree = times[num_queues + 3 * num_ranks : num_queues + 3 * num_ranks + 2 * leaves]

    def number(q: int, j: int) -> int:
        return op_first[q] + (count[q] - 1 - j if turned else j)

    def is_least(q: int, r: int) -> bool:
        """Whether no other queue of rank r that takes memory has a next op of less value."""
        value = values[number(q, head[q])]
        for other in range(rank_first[r], rank_first[r + 1]):
            if memory[other] > 0 and head[other] < count[other] and values[number(other, head[other])] < value:
                return False
        return True

    def may_take(q: int, r: int) -> bool:
        """Whether the next op of q leaves rank r under its cap, and able to finish what it has begun."""
        level = held[r] + memory[q]
        return memory[q] <= 0 or (
            level <= limit[r]
            and (
                several[r] == 0
                or (
                    (not in_turn or is_least(q, r))
                    and can_finish(
                        q, limit[r] - level, rank_first[r], rank_first[r + 1], head, count, memory, pipeline
                    )
                )
            )
        )

    def earliest(r: int) -> float:
        """When rank r can start an op next, as far as is known."""
        found = INFINITE
        for q in range(rank_first[r], rank_first[r + 1]):
            if ready[q] < found and may_take(q, r):
                found = ready[q]
        return max(found, free[r])

    def ready_time(q: int) -> float:
        """When the next op of queue q has all it needs; INFINITE while that is not known."""
        j = head[q]
        time = INFINITE if j >= count[q] else 0.0
        before = message_from[q]
        if before >= 0 and time < INFINITE:
            time = start[number(before, j)] + duration[before] + delay[q] if head[before] > j else INFINITE
        before = local_from[q]
        if before >= 0 and time < INFINITE:
            time = max(time, start[number(before, j)] + duration[before]) if head[before] > j else INFINITE
        return time

    total = 0
    head[:] = 0
    for q in range(num_queues):
        total += count[q]
        ready[q] = 0.0 if message_from[q] < 0 and local_from[q] < 0 and count[q] > 0 else INFINITE
    tree[:] = INFINITE
    for r in range(num_ranks):
        free[r] = p.release[r]
        held[r] = 0.0
        placed[r] = p.row_first[r]
        limit[r] = cap[r] + EPSILON * cap[r]
        takers = 0
        for q in range(rank_first[r], rank_first[r + 1]):
            if memory[q] > 0:
                takers += 1
        several[r] = 1 if takers > 1 else 0
    for r in range(num_ranks):
        tree[leaves + r] = earliest(r)
    fill(tree)
    makespan = 0.0
    for _ in range(total):
        time = tree[1]
        if time >= INFINITE:
            return -1.0
        r = least_of(tree, leaves)
        horizon = time + wait[r]
        chosen, least = -1, INFINITE
        for q in range(rank_first[r], rank_first[r + 1]):
            if ready[q] <= horizon and may_take(q, r):
                value = values[number(q, head[q])]
                if value < least:
                    least, chosen = value, q
        j = head[chosen]
        begun = max(time, ready[chosen])
        start[number(chosen, j)] = begun
        free[r] = begun + duration[chosen]
        makespan = max(makespan, free[r] + p.tail[r])
        row[placed[r]] = chosen
        placed[r] += 1
        held[r] += memory[chosen]
        head[chosen] = j + 1
        ready[chosen] = ready_time(chosen)
        after = local_to[chosen]
        if after >= 0 and head[after] == j:
            ready[after] = ready_time(after)
        after = message_to[chosen]
        if after >= 0 and head[after] == j:
            ready[after] = ready_time(after)
            if rank[after] != r:
                sift(tree, leaves + rank[after], earliest(rank[after]))
        sift(tree, leaves + r, earliest(r))
    return makespan
