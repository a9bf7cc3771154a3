"""The earliest start of every op of given orders: as soon as its row comes to it and what it needs is there.

    row 0 | 0 0 1 1         queue 2 waits for messages from queue 0, queue 1 for those from queue 3
    row 1 | 2 3 2 3         starts: 0 in row 0, then 0 and 2, then 3 and 1, ...

Whatever the order in which rows are gone through, the starts are the same, and where the rows end: no op ever takes
back that it is ready. So one sweep is a proof that orders end, or that they never do.
"""

from __future__ import annotations

from penstock.engine.arrays import Floats, Ints
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
        stack, waits: working space of 2 R ints, and of R ints, which only what is irregular needs.
    """
    rank, op_first, row_first, duration = p.rank, p.op_first, p.row_first, p.duration
    message_from, delay, local_from, message_to = p.message_from, p.delay, p.local_from, p.message_to
    num_rows = len(row_first) - 1
    for q in range(len(rank)):
        head[q] = 0
    for r in range(num_rows):
        place[r] = row_first[r]
        free[r] = 0.0
        stack[r] = num_rows - 1 - r
        if more is not None:
            waits[r] = 0
    depth = num_rows
    while depth > 0:
        depth -= 1
        r = stack[depth]
        if more is not None:
            waits[r] = 1
        at, end, clock = place[r], row_first[r + 1], free[r]
        while at < end:
            q = row[at]
            j = head[q]
            time = clock
            before = message_from[q]
            if before >= 0:
                if head[before] <= j:
                    break
                time = max(time, start[op_first[before] + j] + duration[before] + delay[q])
            before = local_from[q]
            if before >= 0:
                if head[before] <= j:
                    break
                time = max(time, start[op_first[before] + j] + duration[before])
            if more is not None:
                ready = True
                for n in range(more.need_first[q], more.need_first[q + 1]):
                    before, last = more.need_queue[n], last_needed(j, more.before[n], more.after[n], more.shift[n])
                    if last < 0:
                        continue
                    if head[before] <= last:
                        ready = False
                        break
                    time = max(time, start[op_first[before] + last] + duration[before] + more.need_delay[n])
                for h in range(more.host_first[q], more.host_first[q + 1]):
                    other = more.hosts[h]
                    if other != r:
                        if place[other] >= row_first[other + 1] or row[place[other]] != q:
                            ready = False
                            break
                        time = max(time, free[other])
                if not ready:
                    break
                for h in range(more.host_first[q], more.host_first[q + 1]):
                    other = more.hosts[h]
                    if other != r:  # the last of its rows to come takes the others along
                        free[other] = time + duration[q]
                        place[other] += 1
                        if waits[other] == 1:
                            waits[other] = 0
                            stack[depth] = other
                            depth += 1
            start[op_first[q] + j] = time
            clock = time + duration[q]
            head[q] = j + 1
            at += 1
            if more is None:
                after = message_to[q]
                if after >= 0 and head[after] == j:  # its row may stand before just this op
                    other = rank[after]
                    if other != r and place[other] < row_first[other + 1] and row[place[other]] == after:
                        stack[depth] = other
                        depth += 1
            else:
                for u in range(more.unlock_first[q], more.unlock_first[q + 1]):
                    after = more.unlocks[u]
                    other = rank[after]
                    if (
                        other != r
                        and waits[other] == 1
                        and place[other] < row_first[other + 1]
                        and row[place[other]] == after
                    ):
                        waits[other] = 0
                        stack[depth] = other
                        depth += 1
        place[r], free[r] = at, clock
    makespan = 0.0
    for r in range(num_rows):
        if place[r] < row_first[r + 1]:
            return -1.0
        makespan = max(makespan, free[r] + p.tail[r])
    return makespan
