"""Longest paths and Jackson's preemptive schedule, over the arrays of `problem`."""

from __future__ import annotations

import numpy as np

from penstock.engine.arrays import Floats, IntRows, Ints
from penstock.engine.network import Network

NEVER = -1e300


def heads(
    p: Network,
    order: Ints,
    release: IntRows,
    lag: IntRows,
    floor: Floats,
    first_only: bool,
    behind: IntRows,
    head: Floats,
) -> None:
    """How early each op can start at best: the longest path to it over what it waits for, op by op.

    Besides messages and its own stage an op waits for the one before it in its queue, and where memory is short for
    older ops to free theirs: op j of queue q for op `j - lag[k, q]` of queue `release[k, q]`.

    Args:
        order: queues, each after those that it waits for.
        release, lag: two rows, one entry per queue; release is -1 where there is none.
        floor: per queue, when a path may begin there (NEVER: not at all); first_only: at its first op only.
        behind: op j of queue q comes after op `j - behind[q, k]` of the k-th queue of its rank; then an op also
            waits for all that must run before it on its rank. Without rows that is left out.
        head: out, per op; NEVER where no path leads.
    """
    longest = 0
    for q in range(len(p.rank)):
        longest = max(longest, p.size[q])
    taken, count = np.zeros(behind.shape[1], np.int64), np.zeros(behind.shape[1], np.int64)
    for j in range(longest):
        for at in range(len(order)):
            q = order[at]
            if j >= p.size[q]:
                continue
            time = floor[q] if j == 0 or not first_only else NEVER
            if j > 0:
                time = max(time, head[p.op_first[q] + j - 1] + p.duration[q])
            before = p.message_from[q]
            if before >= 0:
                time = max(time, head[p.op_first[before] + j] + p.duration[before] + p.delay[q])
            before = p.local_from[q]
            if before >= 0:
                time = max(time, head[p.op_first[before] + j] + p.duration[before])
            for k in range(2):
                before = release[k, q]
                if before >= 0 and j >= lag[k, q]:
                    time = max(time, head[p.op_first[before] + j - lag[k, q]] + p.duration[before])
            if len(behind) > 0:
                # All that must run before, as early as each can: when the rank is through with it at best.
                first = p.rank_first[p.rank[q]]
                several, left = p.rank_first[p.rank[q] + 1] - first, 0
                for k in range(several):
                    taken[k] = 0
                    count[k] = min(p.size[first + k], max(0, j - behind[q, k] + 1))
                    left += count[k]
                through = 0.0
                while left > 0:
                    chosen, begins = -1, -NEVER
                    for k in range(several):
                        if taken[k] < count[k] and head[p.op_first[first + k] + taken[k]] < begins:
                            begins = head[p.op_first[first + k] + taken[k]]
                            chosen = k
                    through = max(through, begins) + p.duration[first + chosen]
                    taken[chosen] += 1
                    left -= 1
                time = max(time, through)
            head[p.op_first[q] + j] = time


def jackson(p: Network, r: int, head: Floats, tail: Floats, front: Ints, left: Floats) -> float:
    """The length of Jackson's preemptive schedule of rank r: no order of its ops can end sooner.

    At every moment the op that may run (its head has passed) and has the longest tail runs; the bound is the
    largest end plus tail. Within a queue heads rise and tails fall, so that only the front of each counts.
    Working space: `front` ints and `left` floats, one a queue of the rank.
    """
    first, last = p.rank_first[r], p.rank_first[r + 1]
    unfinished = 0
    for q in range(first, last):
        front[q - first] = 0
        left[q - first] = p.duration[q]
        unfinished += p.size[q]
    bound = time = 0.0
    while unfinished > 0:
        chosen, longest, coming = -1, NEVER, -NEVER
        for q in range(first, last):
            j = front[q - first]
            if j >= p.size[q]:
                continue
            begins = head[p.op_first[q] + j]
            if begins > time:
                coming = min(coming, begins)
            else:
                follows = tail[p.op_first[q] + p.size[q] - 1 - j]
                if follows > longest:
                    longest, chosen = follows, q
        if chosen < 0:
            time = coming
            continue
        if time + left[chosen - first] <= coming:
            time += left[chosen - first]
            bound = max(bound, time + longest)
            left[chosen - first] = p.duration[chosen]
            front[chosen - first] += 1
            unfinished -= 1
        else:
            left[chosen - first] -= coming - time
            time = coming
    return bound


def jackson_all(p: Network, head: Floats, tail: Floats, front: Ints, left: Floats) -> float:
    """The largest bound of all ranks."""
    bound = 0.0
    for r in range(len(p.cap)):
        bound = max(bound, jackson(p, r, head, tail, front, left))
    return bound
