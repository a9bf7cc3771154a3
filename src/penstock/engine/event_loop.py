"""The event loop: drives the decision core through time. Plain arrays, so that it also runs compiled.

All that happens at one moment is taken in before any rank decides, so ties never depend on event order.
Ranks then decide in rank order: those that may decide otherwise than the last time. A row runs one op at a time, so
when its op ends stands in a tree of minima over rows; a heap has only the messages under way and ranks that wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.arrays import Floats, Heap, Ints
from penstock.engine.decider import NOTHING, RankState, decide, finish, start, wait_until
from penstock.engine.min_tree import least_of, sift
from penstock.engine.network import OpNetwork

IDLE, BUSY, BLOCKED, GATHERING, ASLEEP = 0, 1, 2, 3, 4
"""Asleep is a rank that could start nothing: it is idle again when something reaches it."""
NEVER = math.inf
TOO_LATE = -1


class LinkArrays(NamedTuple):
    """The links of a run. Link a to b has the number `a * num_rows + b`.

    Attributes:
        delay: of each link, ms.
        depth: of each link, how many messages may be under way before its sender blocks; 0 for any number.
        bounded: whether any link has such a bound.
        lines: whether links have conditions instead of a `delay`: see `cross`, which reads all that follows.
        base: ms that come on top for every message.
        busy: of each edge, ms for which its message keeps the link busy.
        late_first, late_from, late_ms: of each link, since when messages are how late.
        line_free, line_last: of each link, when it is free, and when its last message arrives.
    """

    delay: Floats
    depth: Ints
    bounded: bool
    lines: bool
    base: float
    busy: Floats
    late_first: Ints
    late_from: Floats
    late_ms: Floats
    line_free: Floats
    line_last: Floats


class LoopState(NamedTuple):
    """What the event loop reads and writes besides the state of ranks.

    Attributes:
        duration: in, of each op, ms.
        due: in, of each op, when it is planned to start; see `decider.wait_until`.
        left: in, of each row, ms that it has still to run, which only a limit needs.
        start_time, end_time: out, of each op.
        free_time: out, of each op, when its rank could go on: later than its end if a full link blocked the rank.
        arrival_time: out, of each edge.
        peak: out, of each rank, activations.
        turn: out, of each op, how many ops started before it. Ops that take no time start together, but in turn.
        state: of each row, IDLE to ASLEEP.
        last_on: of each row, the op that started last.
        unsent: of each row, the next edge to send.
        wake: of each row, when its wait ends.
        ends: the tree of when each row's op ends, NEVER in all places at first.
        gathered: of each gang, how many ranks stand ready for it. It starts with the last of them.
        in_transit: of each link, how many messages are under way.
        reached: the first row that something has reached at this moment, and one more than the last.
    """

    duration: Floats
    due: Floats
    left: Floats
    start_time: Floats
    end_time: Floats
    free_time: Floats
    arrival_time: Floats
    peak: Floats
    turn: Ints
    state: Ints
    last_on: Ints
    unsent: Ints
    wake: Floats
    ends: Floats
    gathered: Ints
    in_transit: Ints
    reached: Ints


def run(
    policy: int,
    wait: float,
    limit: float,
    p: OpNetwork,
    s: RankState,
    r: LoopState,
    links: LinkArrays,
    arrival: Callable[[int, float], float] | None = None,
) -> int:
    """Runs to the end or until nothing can go on; returns how many ops ended.

    Rows are the ranks and, where ops are asynchronous, as many streams, which use the ranks' memory.

    Args:
        policy: one of the core's.
        wait: how long a rank waits for an op that is nearly due; see `decider.wait_until`. 0 for no waiting.
        limit: the run stops, and returns TOO_LATE, where it is sure to end after so many ms, since what is left of a
            row takes too long.
        arrival: when a message arrives, by its edge and the time of sending, instead of `links`. It is never there
            in C.
    """
    num_rows, num_edges = len(p.first) - 1, len(p.edge_to)
    ends, state, reached = r.ends, r.state, r.reached
    # Only rows between those that something has reached can decide otherwise than the last time. Where ranks wait, or
    # streams change what they may hold, it is any.
    asks_all = links.bounded or wait > 0 or s.under_way is not None
    started = ended = 0
    time = 0.0
    # A heap of (time, code): an edge's arrival, then the end of a rank's wait.
    events = [(0.0, 0)]
    events.pop()
    reached[0], reached[1] = 0, num_rows
    while True:
        for rank in range(reached[0], reached[1]):
            if state[rank] != IDLE:
                continue
            op = decide(policy, rank, p, s)
            if op == NOTHING:
                if s.under_way is None:  # what a stream does changes what its rank may hold
                    state[rank] = ASLEEP
                continue
            if wait > 0:
                until = wait_until(rank, op, time, wait, r.due, r.duration, s)
                if until > time:
                    if r.wake[rank] != until:
                        r.wake[rank] = until
                        heapq.heappush(events, (until, num_edges + rank))
                    continue
            if time + r.left[rank] > limit:
                return TOO_LATE
            begin(rank, op, time, p, s, r)
            r.turn[op] = started
            started += 1
        time = ends[1]
        if len(events) > 0 and events[0][0] < time:
            time = events[0][0]
        if time == NEVER:
            return ended
        reached[0], reached[1] = num_rows, 0
        while ends[1] == time:
            end_last(least_of(ends, len(ends) // 2), p, s, r)
            ended += 1
        sends_from, sends_to = reached[0], reached[1]
        while len(events) > 0 and events[0][0] == time:
            edge = heapq.heappop(events)[1]
            if edge < num_edges:
                arrive(edge, time, p, s, r)
                if links.bounded:
                    r.in_transit[edge_link(edge, p)] -= 1
        if links.bounded:
            sends_from, sends_to = 0, num_rows
        if asks_all:
            reached[0], reached[1] = 0, num_rows
        for rank in range(sends_from, sends_to):
            if state[rank] == BLOCKED:
                send(rank, time, p, s, r, links, events, arrival)


def begin(rank: int, op: int, time: float, p: OpNetwork, s: RankState, r: LoopState) -> None:
    """Starts an op on a row. An op that several ranks run together starts with the last of them to come."""
    start(rank, op, p, s)
    if s.under_way is None:
        r.peak[rank] = max(r.peak[rank], s.held[rank])
    else:
        num_ranks = len(s.under_way)
        holder = rank % num_ranks
        r.peak[holder] = max(r.peak[holder], s.held[holder] + s.held[holder + num_ranks])
    r.last_on[rank] = op
    r.left[rank] -= r.duration[op]
    gang = p.gang[op]
    if gang < 0:
        occupy(rank, op, time, r)
        return
    r.state[rank] = GATHERING
    r.gathered[gang] += 1
    if r.gathered[gang] == p.gang_first[gang + 1] - p.gang_first[gang]:
        for member in range(p.gang_first[gang], p.gang_first[gang + 1]):
            together = p.gang_ops[member]
            occupy(p.rank[together], together, time, r)


def occupy(rank: int, op: int, time: float, r: LoopState) -> None:
    """Makes a row busy with an op that begins at `time`."""
    r.start_time[op] = time
    r.end_time[op] = time + r.duration[op]
    r.state[rank] = BUSY
    sift(r.ends, len(r.ends) // 2 + rank, r.end_time[op])


def end_last(rank: int, p: OpNetwork, s: RankState, r: LoopState) -> None:
    """Ends the op of a row, which has then to send what the op made."""
    op = r.last_on[rank]
    sift(r.ends, len(r.ends) // 2 + rank, NEVER)
    finish(rank, op, s)
    r.unsent[rank] = p.edge_first[op]
    r.state[rank] = BLOCKED
    reach(rank, r)


def reach(row: int, r: LoopState) -> None:
    """Notes that something has reached a row."""
    r.reached[0], r.reached[1] = min(r.reached[0], row), max(r.reached[1], row + 1)


def arrive(edge: int, time: float, p: OpNetwork, s: RankState, r: LoopState) -> None:
    """Hands over what an edge carries, to a row that may be asleep."""
    target = p.edge_to[edge]
    row = p.rank[target]
    s.missing[target] -= 1
    r.arrival_time[edge] = time
    if r.state[row] == ASLEEP:
        r.state[row] = IDLE
        reach(row, r)


def send(
    rank: int,
    time: float,
    p: OpNetwork,
    s: RankState,
    r: LoopState,
    links: LinkArrays,
    events: Heap,
    arrival: Callable[[int, float], float] | None,
) -> None:
    """Sends what the last op of a row made. The row is idle then, or blocked still if a link is full."""
    op, num_rows = r.last_on[rank], len(p.first) - 1
    r.state[rank] = IDLE
    for edge in range(r.unsent[rank], p.edge_first[op + 1]):
        row = p.rank[p.edge_to[edge]]
        if row == rank:
            arrive(edge, time, p, s, r)
            continue
        link = rank * num_rows + row
        if links.bounded:
            if links.depth[link] > 0 and r.in_transit[link] >= links.depth[link]:
                r.state[rank] = BLOCKED
                r.unsent[rank] = edge
                return
            r.in_transit[link] += 1
        if arrival is not None:
            arrives = arrival(edge, time)
        elif links.lines:
            arrives = cross(link, links.busy[edge], time, links)
        else:
            arrives = time + links.delay[link]
        if arrives != time:
            heapq.heappush(events, (arrives, edge))
        else:
            arrive(edge, time, p, s, r)
            if links.bounded:
                r.in_transit[link] -= 1
    r.free_time[op] = time


def cross(link: int, busy: float, now: float, links: LinkArrays) -> float:
    """When a message handed over at `now` arrives: `cost.conditions` over arrays, for what needs no drawing of lots.

    The link is busy with it for `busy` ms, from when it is free of those before it (`line_free[link]`); then the
    message is late by `late_ms[k]`, where `late_from[k]` is the last moment not after that, of those between
    `late_first[link]` and `late_first[link + 1]`; and it does not overtake the one before it (`line_last[link]`).
    """
    begins = max(now, links.line_free[link])
    low, high = links.late_first[link], links.late_first[link + 1]
    late = 0.0
    if low < high:
        while high - low > 1:
            middle = (low + high) // 2
            if links.late_from[middle] <= begins:
                low = middle
            else:
                high = middle
        late = links.late_ms[low]
    left = begins + busy
    arrives = max(left + late, links.line_last[link])
    links.line_free[link] = left
    links.line_last[link] = arrives
    # Rounded, or what a sum leaves over would part what happens at one moment, and turn ties.
    return now + round((arrives + links.base - now) * 1e9) / 1e9


def edge_link(edge: int, p: OpNetwork) -> int:
    """The link an edge travels: its source op is found by bisection, since edges are grouped by source."""
    low, high = 0, len(p.edge_first) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if p.edge_first[middle] <= edge:
            low = middle
        else:
            high = middle
    return p.rank[low] * (len(p.first) - 1) + p.rank[p.edge_to[edge]]
