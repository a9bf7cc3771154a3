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
        head: how many ops of each queue have started.
        placed: the place of each rank's next op in `row`.
        several: 1 where several queues of a rank take memory.
        ready: when the next op of each queue has all it needs; INFINITE while that is not known.
        free, held, limit: of each rank, when it is free, what it holds, and the most that it may hold.
        tree: when each rank can start an op next, in a tree of minima.
    """

    values: Floats
    wait: Floats
    start: Floats
    row: Ints
    head: Ints
    placed: Ints
    several: Ints
    ready: Floats
    free: Floats
    held: Floats
    limit: Floats
    tree: Floats

    @classmethod
    def of(cls, network: Network) -> ListSpace:
        num_ops, num_ranks, num_queues = network.num_ops, network.num_ranks, len(network.rank)
        ints = np.int64
        return cls(
            values=np.empty(num_ops),
            wait=np.zeros(num_ranks),
            start=np.empty(num_ops),
            row=np.empty(num_ops, ints),
            head=np.empty(num_queues, ints),
            placed=np.empty(num_ranks, ints),
            several=np.empty(num_ranks, ints),
            ready=np.empty(num_queues),
            free=np.empty(num_ranks),
            held=np.empty(num_ranks),
            limit=np.empty(num_ranks),
            tree=np.empty(2 * leaves_for(num_ranks)),
        )


def list_ops(p: Network, space: ListSpace, turned: bool, in_turn: bool) -> float:
    """Schedules every op; returns the makespan (ms, with tails), or -1 where the ranks are stuck.

    Args:
        p: `Network`. space: `ListSpace`.
        turned: op j of a queue is number size - 1 - j in `values` and `start`.
        in_turn: what takes memory on a rank does so in the order of its values, however early it is ready.
    """
    rank, rank_first, head, ready, free, tree = p.rank, p.rank_first, space.head, space.ready, space.free, space.tree
    leaves = len(tree) // 2
    prepare(p, space, turned, in_turn)
    makespan = 0.0
    for _ in range(p.op_first[len(rank)]):
        time = tree[1]
        if time >= INFINITE:
            return -1.0
        r = least_of(tree, leaves)
        horizon = time + space.wait[r]
        chosen, least = -1, INFINITE
        for q in range(rank_first[r], rank_first[r + 1]):
            if ready[q] <= horizon and may_take(q, r, p, space, turned, in_turn):
                value = space.values[number(q, head[q], p, turned)]
                if value < least:
                    least, chosen = value, q
        j = head[chosen]
        begun = max(time, ready[chosen])
        space.start[number(chosen, j, p, turned)] = begun
        free[r] = begun + p.duration[chosen]
        makespan = max(makespan, free[r] + p.tail[r])
        space.row[space.placed[r]] = chosen
        space.placed[r] += 1
        space.held[r] += p.memory[chosen]
        head[chosen] = j + 1
        ready[chosen] = ready_time(chosen, p, space, turned)
        after = p.local_to[chosen]
        if after >= 0 and head[after] == j:
            ready[after] = ready_time(after, p, space, turned)
        after = p.message_to[chosen]
        if after >= 0 and head[after] == j:
            ready[after] = ready_time(after, p, space, turned)
            if rank[after] != r:
                sift(tree, leaves + rank[after], earliest(rank[after], p, space, turned, in_turn))
        sift(tree, leaves + r, earliest(r, p, space, turned, in_turn))
    return makespan


def prepare(p: Network, space: ListSpace, turned: bool, in_turn: bool) -> None:
    """Sets the space to where no op has started; args as of `list_ops`."""
    space.head[:] = 0
    for q in range(len(p.rank)):
        is_ready = p.message_from[q] < 0 and p.local_from[q] < 0 and p.size[q] > 0
        space.ready[q] = 0.0 if is_ready else INFINITE
    space.tree[:] = INFINITE
    for r in range(len(p.cap)):
        space.free[r] = p.release[r]
        space.held[r] = 0.0
        space.placed[r] = p.row_first[r]
        space.limit[r] = p.cap[r] + EPSILON * p.cap[r]
        takers = 0
        for q in range(p.rank_first[r], p.rank_first[r + 1]):
            if p.memory[q] > 0:
                takers += 1
        space.several[r] = 1 if takers > 1 else 0
    for r in range(len(p.cap)):
        space.tree[len(space.tree) // 2 + r] = earliest(r, p, space, turned, in_turn)
    fill(space.tree)


def number(q: int, j: int, p: Network, turned: bool) -> int:
    """The number of op `j` of queue `q`."""
    return p.op_first[q] + (p.size[q] - 1 - j if turned else j)


def is_least(q: int, r: int, p: Network, space: ListSpace, turned: bool) -> bool:
    """Whether no other queue of rank r that takes memory has a next op of less value."""
    head, values = space.head, space.values
    value = values[number(q, head[q], p, turned)]
    for other in range(p.rank_first[r], p.rank_first[r + 1]):
        if (
            p.memory[other] > 0
            and head[other] < p.size[other]
            and values[number(other, head[other], p, turned)] < value
        ):
            return False
    return True


def may_take(q: int, r: int, p: Network, space: ListSpace, turned: bool, in_turn: bool) -> bool:
    """Whether the next op of q leaves rank r under its cap, and able to finish what it has begun."""
    level = space.held[r] + p.memory[q]
    if p.memory[q] <= 0:
        return True
    if level > space.limit[r]:
        return False
    if space.several[r] == 0:
        return True
    if in_turn and not is_least(q, r, p, space, turned):
        return False
    room = space.limit[r] - level
    return can_finish(q, room, p.rank_first[r], p.rank_first[r + 1], space.head, p.size, p.memory, p.pipeline)


def earliest(r: int, p: Network, space: ListSpace, turned: bool, in_turn: bool) -> float:
    """When rank r can start an op next, as far as is known."""
    found = INFINITE
    for q in range(p.rank_first[r], p.rank_first[r + 1]):
        if space.ready[q] < found and may_take(q, r, p, space, turned, in_turn):
            found = space.ready[q]
    return max(found, space.free[r])


def ready_time(q: int, p: Network, space: ListSpace, turned: bool) -> float:
    """When the next op of queue q has all it needs; INFINITE while that is not known."""
    j = space.head[q]
    if j >= p.size[q]:
        return INFINITE
    time = 0.0
    before = p.message_from[q]
    if before >= 0:
        if space.head[before] <= j:
            return INFINITE
        time = space.start[number(before, j, p, turned)] + p.duration[before] + p.delay[q]
    before = p.local_from[q]
    if before >= 0:
        if space.head[before] <= j:
            return INFINITE
        time = max(time, space.start[number(before, j, p, turned)] + p.duration[before])
    return time
