"""The event loop: drives the decision core through time. Plain arrays, so that it also runs compiled.

All that happens at one moment is taken in before any rank decides, so ties never depend on event order.
Ranks then decide in rank order: those that may decide otherwise than the last time.
"""

from __future__ import annotations

import heapq
from typing import Any

from penstock.engine import decider
from penstock.engine.decider import Array, decide, finish, note_under_way, start, wait_until

COMPILED_WITH = (decider,)

IDLE, BUSY, BLOCKED, GATHERING, ASLEEP = 0, 1, 2, 3, 4
"""Asleep is a rank that could start nothing: it is idle again when something reaches it."""


def run(
    policy: int,
    wait: float,
    due: Array,
    wake: Array,
    duration: Array,
    memory_change: Array,
    delay: Array,
    bounded: bool,
    depth: Array,
    cap: Array,
    warmup_left: Array,
    rank_of: Array,
    first: Array,
    missing: Array,
    edge_first: Array,
    edge_to: Array,
    queue_rank_first: Array,
    queue_first: Array,
    queue_ops: Array,
    queue_of: Array,
    priority: Array,
    head: Array,
    next_frozen: Array,
    done: Array,
    held: Array,
    state: Array,
    in_transit: Array,
    unsent: Array,
    start_time: Array,
    end_time: Array,
    arrival_time: Array,
    free_time: Array,
    peak: Array,
    turn: Array,
    gang: Array,
    gang_first: Array,
    gang_ops: Array,
    gathered: Array,
    lines: bool,
    base: float,
    busy: Array,
    late_first: Array,
    late_from: Array,
    late_ms: Array,
    line_free: Array,
    line_last: Array,
    beside: Any = None,
    arrival: Any = None,
) -> int:
    """Runs to the end or until nothing can go on; returns how many ops ended.

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
    how many ranks stand ready for gang g, which starts with the last of them; `missing` and the rest are the core's
    state.
    """
    num_ops, num_rows, num_edges = len(duration), len(first) - 1, len(edge_to)
    started = ended = 0
    time = 0.0
    last_on = [-1] * num_rows
    # A heap of (time, code): an op's end, then an edge's arrival, then the end of a rank's wait.
    events = [(0.0, 0)]
    events.pop()
    while True:
        for rank in range(num_rows):
            if state[rank] != IDLE:
                continue
            op = decide(
                policy, rank, first, queue_rank_first, queue_first, queue_ops, head, priority, missing, done,
                next_frozen, memory_change, held, cap, warmup_left, gang, beside,
            )  # fmt: skip
            if op == decider.NOTHING:
                if beside is None:  # what a stream does changes what its rank may hold
                    state[rank] = ASLEEP
                continue
            if wait > 0:
                until = wait_until(rank, op, time, wait, due, duration, done, next_frozen)
                if until > time:
                    if wake[rank] != until:
                        wake[rank] = until
                        heapq.heappush(events, (until, num_ops + num_edges + rank))
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
            if gang[op] < 0:
                start_time[op] = time
                end_time[op] = time + duration[op]
                state[rank] = BUSY
                heapq.heappush(events, (end_time[op], op))
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
                heapq.heappush(events, (end_time[together], together))
        if len(events) == 0:
            return ended
        time = events[0][0]
        while len(events) > 0 and events[0][0] == time:
            code = heapq.heappop(events)[1]
            if code < num_ops:
                rank = rank_of[code]
                finish(rank, code, memory_change, held)
                if beside is not None:
                    note_under_way(rank, -min(memory_change[code], 0.0), num_rows, num_ops, beside)
                ended += 1
                unsent[rank] = edge_first[code]
                state[rank] = BLOCKED
            elif code < num_ops + num_edges:
                edge = code - num_ops
                target = edge_to[edge]
                missing[target] -= 1
                if state[rank_of[target]] == ASLEEP:
                    state[rank_of[target]] = IDLE
                arrival_time[edge] = time
                if bounded:
                    in_transit[edge_link(edge, num_rows, rank_of, edge_first, edge_to)] -= 1
        for rank in range(num_rows):
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
                    if state[rank_of[target]] == ASLEEP:
                        state[rank_of[target]] = IDLE
                    arrival_time[edge] = time
                    in_transit[link] -= 1
                else:
                    heapq.heappush(events, (arrives, num_ops + edge))
            if state[rank] == IDLE:
                free_time[op] = time


def cross(
    link: int,
    busy: float,
    now: float,
    base: float,
    late_first: Array,
    late_from: Array,
    late_ms: Array,
    line_free: Array,
    line_last: Array,
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


def edge_link(edge: int, num_ranks: int, rank_of: Array, edge_first: Array, edge_to: Array) -> int:
    """The link an edge travels: its source op is found by bisection, since edges are grouped by source."""
    low, high = 0, len(edge_first) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if edge_first[middle] <= edge:
            low = middle
        else:
            high = middle
    return rank_of[low] * num_ranks + rank_of[edge_to[edge]]
