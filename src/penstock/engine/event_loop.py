"""The event loop: drives the decision core through time. Plain arrays, so that it also runs compiled.

All that happens at one moment is taken in before any rank decides, so ties never depend on event order.
Ranks then decide in rank order: those that may decide otherwise than the last time. A row runs one op at a time, so
when its op ends stands in a tree of minima over rows; a heap has only the messages under way and ranks that wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from penstock.engine.arrays import Floats, Ints
from penstock.engine.decider import NOTHING, decide, finish, note_under_way, start, wait_until
from penstock.engine.min_tree import least_of, sift

IDLE, BUSY, BLOCKED, GATHERING, ASLEEP = 0, 1, 2, 3, 4
"""Asleep is a rank that could start nothing: it is idle again when something reaches it."""
NEVER = math.inf
TOO_LATE = -1


def run(
    policy: int,
    wait: float,
    due: Floats,
    wake: Floats,
    duration: Floats,
    memory_change: Floats,
    delay: Floats,
    bounded: bool,
    depth: Ints,
    cap: Floats,
    warmup_left: Ints,
    rank_of: Ints,
    first: Ints,
    missing: Ints,
    edge_first: Ints,
    edge_to: Ints,
    queue_rank_first: Ints,
    queue_first: Ints,
    queue_ops: Ints,
    queue_of: Ints,
    priority: Ints,
    head: Ints,
    next_frozen: Ints,
    done: Ints,
    held: Floats,
    state: Ints,
    in_transit: Ints,
    unsent: Ints,
    start_time: Floats,
    end_time: Floats,
    arrival_time: Floats,
    free_time: Floats,
    peak: Floats,
    turn: Ints,
    gang: Ints,
    gang_first: Ints,
    gang_ops: Ints,
    gathered: Ints,
    lines: bool,
    base: float,
    busy: Floats,
    late_first: Ints,
    late_from: Floats,
    late_ms: Floats,
    line_free: Floats,
    line_last: Floats,
    ends: Floats,
    left: Floats,
    limit: float,
    beside: Floats = None,
    arrival: Callable[[int, float], float] | None = None,
) -> int:
    """Runs to the end or until nothing can go on; returns how many ops ended. It stops, and returns TOO_LATE,
    where the run is sure to end after `limit` ms, since what is left of a row takes too long.

    Rows are the ranks and, where ops are asynchronous, as many streams, which use the ranks' memory.

    In: `policy`, one of the core's; `wait`, `due` per op (0: no waiting, see `decider.wait_until`); `duration` and
    `memory_change` per op (ms, activations); `delay[a * num_rows + b]` (ms), and alike `depth`, how many messages a
    link may hold under way before its sender blocks (0: no bound; `bounded` says whether any has one). Where `lines`
    is true links have conditions instead of `delay`: see `cross`. Where `arrival` is there (never when compiled), it
    says by edge and time of sending when a message arrives.
    Out: `start_time`, `end_time` per op; `arrival_time` per edge; `free_time` per op, when its rank could
    go on (later than its end where a full link blocked it); `peak` activations per rank; `turn` per op,
    how many ops started before it (ops that take no time start together, but one after the other).
    Working space: `wake[rank]` is when its wait ends, `unsent[rank]` the next edge of a blocked rank; `gathered[g]`
    how many ranks stand ready for gang g, which starts with the last of them; `ends` is the tree of when each
    row ends, NEVER in all its places at first; `left` is ms that each row has still to run, which only a limit needs;
    `missing` and the rest are the core's state.
    """
    num_ops, num_rows, num_edges = len(duration), len(first) - 1, len(edge_to)
    started = ended = 0
    time = 0.0
    last_on = [-1] * num_rows
    # A heap of (time, code): an edge's arrival, then the end of a rank's wait.
    events = [(0.0, 0)]
    events.pop()
    leaves = len(ends) // 2
    # Only rows between those that something has reached can decide otherwise than the last time. Where ranks wait, or
    # streams change what they may hold, it is any.
    asks_all = wait > 0 or beside is not None
    low, high = 0, num_rows
    while True:
        for rank in range(low, high):
            if state[rank] != IDLE:
                continue
            op = decide(
                policy, rank, first, queue_rank_first, queue_first, queue_ops, head, priority, missing, done,
                next_frozen, memory_change, held, cap, warmup_left, gang, beside,
            )  # fmt: skip
            if op == NOTHING:
                if beside is None:  # what a stream does changes what its rank may hold
                    state[rank] = ASLEEP
                continue
            if wait > 0:
                until = wait_until(rank, op, time, wait, due, duration, done, next_frozen)
                if until > time:
                    if wake[rank] != until:
                        wake[rank] = until
                        heapq.heappush(events, (until, num_edges + rank))
                    continue
            start(rank, op, done, first, next_frozen, head, queue_of, priority, memory_change, held, warmup_left)
            if beside is None:
                peak[rank] = max(peak[rank], held[rank])
            else:
                holder = rank % (num_rows // 2)
                peak[holder] = max(peak[holder], held[holder] + held[holder + num_rows // 2])
                note_under_way(rank, min(memory_change[op], 0.0), num_rows, num_ops, beside)
            turn[op] = started
            started += 1
            last_on[rank] = op
            if time + left[rank] > limit:
                return TOO_LATE
            left[rank] -= duration[op]
            if gang[op] < 0:
                start_time[op] = time
                end_time[op] = time + duration[op]
                state[rank] = BUSY
                sift(ends, leaves + rank, end_time[op])
                continue
            state[rank] = GATHERING
            gathered[gang[op]] += 1
            if gathered[gang[op]] < gang_first[gang[op] + 1] - gang_first[gang[op]]:
                continue
            for member in range(gang_first[gang[op]], gang_first[gang[op] + 1]):
                together = gang_ops[member]
                start_time[together] = time
                end_time[together] = time + duration[together]
                state[rank_of[together]] = BUSY
                sift(ends, leaves + rank_of[together], end_time[together])
        time = ends[1]
        if len(events) > 0 and events[0][0] < time:
            time = events[0][0]
        if time == NEVER:
            return ended
        low, high = num_rows, 0
        while ends[1] == time:
            rank = least_of(ends, leaves)
            sift(ends, leaves + rank, NEVER)
            op = last_on[rank]
            finish(rank, op, memory_change, held)
            if beside is not None:
                note_under_way(rank, -min(memory_change[op], 0.0), num_rows, num_ops, beside)
            ended += 1
            unsent[rank] = edge_first[op]
            state[rank] = BLOCKED
            low, high = min(low, rank), max(high, rank + 1)
        sends_from, sends_to = low, high
        while len(events) > 0 and events[0][0] == time:
            edge = heapq.heappop(events)[1]
            if edge >= num_edges:
                continue
            target = edge_to[edge]
            missing[target] -= 1
            row = rank_of[target]
            if state[row] == ASLEEP:
                state[row] = IDLE
                low, high = min(low, row), max(high, row + 1)
            arrival_time[edge] = time
            if bounded:
                in_transit[edge_link(edge, num_rows, rank_of, edge_first, edge_to)] -= 1
        if bounded:
            sends_from, sends_to = 0, num_rows
        if bounded or asks_all:
            low, high = 0, num_rows
        for rank in range(sends_from, sends_to):
            if state[rank] != BLOCKED:
                continue
            op = last_on[rank]
            state[rank] = IDLE
            for edge in range(unsent[rank], edge_first[op + 1]):
                target = edge_to[edge]
                if rank_of[target] == rank:
                    missing[target] -= 1
                    arrival_time[edge] = time
                    continue
                link = rank * num_rows + rank_of[target]
                if bounded and depth[link] > 0 and in_transit[link] >= depth[link]:
                    state[rank] = BLOCKED
                    unsent[rank] = edge
                    break
                in_transit[link] += 1
                if arrival is not None:
                    arrives = arrival(edge, time)
                elif lines:
                    arrives = cross(
                        link, busy[edge], time, base, late_first, late_from, late_ms, line_free, line_last
                    )
                else:
                    arrives = time + delay[link]
                if arrives == time:
                    missing[target] -= 1
                    row = rank_of[target]
                    if state[row] == ASLEEP:
                        state[row] = IDLE
                        low, high = min(low, row), max(high, row + 1)
                    arrival_time[edge] = time
                    in_transit[link] -= 1
                else:
                    heapq.heappush(events, (arrives, edge))
            if state[rank] == IDLE:
                free_time[op] = time


def cross(
    link: int,
    busy: float,
    now: float,
    base: float,
    late_first: Ints,
    late_from: Floats,
    late_ms: Floats,
    line_free: Floats,
    line_last: Floats,
) -> float:
    """When a message handed over at `now` arrives: `cost.conditions` over arrays, for what needs no drawing of lots.

    The link is busy with it for `busy` ms, from when it is free of those before it (`line_free[link]`); then the
    message is late by `late_ms[k]`, where `late_from[k]` is the last moment not after that, of those between
    `late_first[link]` and `late_first[link + 1]`; and it does not overtake the one before it (`line_last[link]`).
    `base` ms come on top.
    """
    begins = max(now, line_free[link])
    low, high = late_first[link], late_first[link + 1]
    late = 0.0
    if low < high:
        while high - low > 1:
            middle = (low + high) // 2
            if late_from[middle] <= begins:
                low = middle
            else:
                high = middle
        late = late_ms[low]
    left = begins + busy
    arrives = max(left + late, line_last[link])
    line_free[link] = left
    line_last[link] = arrives
    # Rounded, or what a sum leaves over would part what happens at one moment, and turn ties.
    return now + round((arrives + base - now) * 1e9) / 1e9


def edge_link(edge: int, num_ranks: int, rank_of: Ints, edge_first: Ints, edge_to: Ints) -> int:
    """The link an edge travels: its source op is found by bisection, since edges are grouped by source."""
    low, high = 0, len(edge_first) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if edge_first[middle] <= edge:
            low = middle
        else:
            high = middle
    return rank_of[low] * num_ranks + rank_of[edge_to[edge]]
