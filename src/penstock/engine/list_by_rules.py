"""List scheduling by rules: makes the rows of queues, deciding which queue a rank takes its next op from.

Like `decider`, plain functions over arrays that run as they stand or compiled, and know no clock: the time of
the decision is told. `decide` says what a rank would do, `advance` takes note that it does so; `run` drives both
through time until every op has its place.

A rank goes through its classes of ops in the order that its rules give (registered ops, then backward and
forward in the order of `mode` and units, then weight gradients), and through the queues of a class in the
order of the traversal. The first op that is ready and fits under the caps is the one.

`list_by_values` is the other list scheduler, and another algorithm: it knows nothing but a number for each op,
waits for better ones, and proves at each op that its rank can finish, thousands of times per search. Here
classes take turns, intervals and units are counted, several rows run one op, needs unlock windows, streams give
memory back late, and a user's function may be asked; room is kept by `reserves`, known ahead. Both read one
`Network` and use `min_tree` to find the rank that can go on first. The starts by which they decide are those of
`sweep.Timer`, bit by bit.

The arrays are those of `rule_tables`: `t` is what a run reads, `s` what it changes.
"""

from __future__ import annotations

import math

from penstock.engine.min_tree import least_of, sift
from penstock.engine.needs import last_needed
from penstock.engine.rule_tables import (
    BACKWARD,
    FIRST,
    FORWARD,
    LAST,
    NUM_CLASSES,
    WEIGHT,
    ListState,
    Tables,
)
from penstock.engine.tolerance import EPSILON

NOTHING = -1
NEVER = math.inf
BACKWARD_FIRST, FORWARD_FIRST, INTERLEAVED = 0, 1, 2
IN_ORDER, EARLIEST, BY_MICROBATCH = 0, 1, 2

READY, DONE, WAITS, FULL, STAGE_FULL, REFUSED = range(6)
"""Why the head of a queue can or can't start: see `standing`."""


def has_next(q: int, t: Tables, s: ListState) -> bool:
    """Whether queue `q` has ops left to start."""
    return t.network.op_first[q] + s.started[q] < t.network.op_first[q + 1]


def ready_time(q: int, t: Tables, s: ListState) -> float:
    """When the next op of queue `q` has all it needs; NEVER while something that it needs has not started."""
    if not has_next(q, t, s):
        return NEVER
    latest = 0.0
    for n in range(t.more.need_first[q], t.more.need_first[q + 1]):
        source = t.more.need_queue[n]
        last = last_needed(s.started[q], t.more.before[n], t.more.after[n], t.more.shift[n])
        if last < 0:
            continue
        if last >= s.started[source]:
            return NEVER
        ended = s.start_time[t.network.op_first[source] + last] + t.network.duration[source]
        latest = max(latest, ended + t.more.need_delay[n])
    return latest


def standing(q: int, time: float, t: Tables, s: ListState) -> int:
    """Whether the next op of queue `q` could start at `time`, or why not."""
    if s.ready_at[q] > time:
        return WAITS if has_next(q, t, s) else DONE
    memory, count = t.queues.memory[q], t.queues.count[q]
    if memory > 0 or count > 0:
        for h in range(t.more.host_first[q], t.more.host_first[q + 1]):
            rank = t.ranks.holder[t.more.hosts[h]]
            needed = s.memory[rank] + memory + t.queues.reserve[q]
            if needed > t.ranks.cap_memory[rank] * (1 + EPSILON):
                return FULL
            in_flight = s.in_flight[rank] + count + t.queues.reserve_count[q]
            if in_flight > t.ranks.cap_count[rank] * (1 + EPSILON):
                return FULL
        release = t.queues.release[q]
        if release >= 0 and s.started[q] - s.started[release] >= t.queues.cap[q]:
            return STAGE_FULL
    return READY if s.refused[q] == 0 else REFUSED


def pick_in_class(rank: int, kind: int, time: float, t: Tables, s: ListState) -> int:
    """The queue of one class that a rank would take, or NOTHING."""
    slot = rank * NUM_CLASSES + kind
    first = t.slots.first[slot]
    size = t.slots.first[slot + 1] - first
    if size == 0:
        return NOTHING
    pick = t.slots.pick[slot]
    best = NOTHING
    begin_at = 0
    if t.slots.interval[slot] > 0:
        begin_at = interval_position(slot, t, s)
        q = t.slots.queues[first + begin_at]
        if standing(q, time, t, s) == READY:
            return q
        if t.slots.hold[slot] != 0:
            return NOTHING
    for offset in range(size):
        at = begin_at + offset
        q = t.slots.queues[first + (at if at < size else at - size)]
        if standing(q, time, t, s) != READY:
            continue
        if pick == IN_ORDER:
            return q
        if (
            best == NOTHING
            or (pick == EARLIEST and s.ready_at[q] < s.ready_at[best])
            or (pick == BY_MICROBATCH and s.started[q] < s.started[best])
        ):
            best = q
    return best


def interval_position(slot: int, t: Tables, s: ListState) -> int:
    """Where in its traversal a class slot stands: at the next queue with ops left once an interval is full."""
    first = t.slots.first[slot]
    size = t.slots.first[slot + 1] - first
    at = s.position[slot]
    if s.stepped[slot] < t.slots.interval[slot] and has_next(t.slots.queues[first + at], t, s):
        return at
    for offset in range(1, size + 1):
        if has_next(t.slots.queues[first + (at + offset) % size], t, s):
            return (at + offset) % size
    return at


def has_left(rank: int, kind: int, t: Tables, s: ListState) -> bool:
    """Whether a rank still has ops of a class to start."""
    slot = rank * NUM_CLASSES + kind
    for place in range(t.slots.first[slot], t.slots.first[slot + 1]):
        q = t.slots.queues[place]
        if has_next(q, t, s):
            return True
    return False


def preferred(rank: int, t: Tables, s: ListState) -> int:
    """BACKWARD or FORWARD: which of the two the rules want next."""
    if s.turn_left[rank] > 0:
        return s.turn[rank]
    if t.ranks.mode[rank] == BACKWARD_FIRST:
        return BACKWARD
    if t.ranks.mode[rank] == FORWARD_FIRST:
        return FORWARD
    return BACKWARD if s.turn[rank] == FORWARD else FORWARD


def decide(rank: int, time: float, t: Tables, s: ListState) -> int:
    """The queue whose next op the rank takes at `time`, or NOTHING."""
    if s.warmup_left[rank] > 0:
        return pick_in_class(rank, FORWARD, time, t, s)
    q = pick_in_class(rank, FIRST, time, t, s)
    if q != NOTHING:
        return q
    kind = preferred(rank, t, s)
    q = pick_in_class(rank, kind, time, t, s)
    if q != NOTHING:
        return q
    if t.ranks.strict[rank] == 0 or not has_left(rank, kind, t, s):
        q = pick_in_class(rank, FORWARD if kind == BACKWARD else BACKWARD, time, t, s)
        if q != NOTHING:
            return q
    if t.ranks.patience[rank] > 0 and comes_soon(rank, time, t, s):
        return NOTHING
    q = pick_in_class(rank, WEIGHT, time, t, s)
    if q != NOTHING:
        return q
    return pick_in_class(rank, LAST, time, t, s)


def comes_soon(rank: int, time: float, t: Tables, s: ListState) -> bool:
    """Whether a forward or backward that fits becomes ready within the rank's patience."""
    for kind in (BACKWARD, FORWARD):
        slot = rank * NUM_CLASSES + kind
        for place in range(t.slots.first[slot], t.slots.first[slot + 1]):
            q = t.slots.queues[place]
            ready = s.ready_at[q]
            if time < ready <= time + t.ranks.patience[rank] and standing(q, ready, t, s) == READY:
                return True
    return False


def wake(row: int, time: float, s: ListState) -> None:
    """Lets a row decide again at `time`."""
    sift(s.tree, len(s.tree) // 2 + row, time)


def wake_sooner(row: int, time: float, s: ListState) -> None:
    """Lets a row decide again at `time` once it is free, if it would not do so sooner."""
    time = max(time, s.free_at[row])
    if time < s.tree[len(s.tree) // 2 + row]:
        wake(row, time, s)


def prepare(t: Tables, s: ListState) -> None:
    """Finds out what is ready from the start, and which rows decide then."""
    for q in range(len(s.ready_at)):
        s.ready_at[q] = ready_time(q, t, s)
        if s.ready_at[q] < NEVER:
            for h in range(t.more.host_first[q], t.more.host_first[q + 1]):
                wake(t.more.hosts[h], 0.0, s)


def begin(q: int, time: float, t: Tables, s: ListState) -> float:
    """Starts the next op of queue `q`, decided on at `time`; returns when it starts.

    An op that several ranks run together starts when the last of them is free. Successors learn when they
    are ready, and the ranks concerned when to decide again.
    """
    started_at = time
    for h in range(t.more.host_first[q], t.more.host_first[q + 1]):
        started_at = max(started_at, s.free_at[t.more.hosts[h]])
    ends_at = started_at + t.network.duration[q]
    s.start_time[t.network.op_first[q] + s.started[q]] = started_at
    s.started[q] += 1
    for h in range(t.more.host_first[q], t.more.host_first[q + 1]):
        rank = t.more.hosts[h]
        s.free_at[rank] = ends_at
        wake(rank, ends_at, s)
        if t.queues.late[q] == 0:
            holder = t.ranks.holder[rank]
            s.memory[holder] += t.queues.memory[q]
            s.in_flight[holder] += t.queues.count[q]
        elif t.ranks.beside[rank] >= 0:
            wake_sooner(t.ranks.beside[rank], ends_at, s)
        note_turn(rank, t.queues.op_class[q], t, s)
        note_interval(rank, q, t, s)
        s.rows[t.network.row_first[rank] + s.filled[rank]] = q
        s.filled[rank] += 1
    s.ready_at[q] = ready_time(q, t, s)
    for u in range(t.more.unlock_first[q], t.more.unlock_first[q + 1]):
        target = t.more.unlocks[u]
        if s.ready_at[target] != NEVER:
            continue
        ready = ready_time(target, t, s)
        if ready == NEVER:
            continue
        s.ready_at[target] = ready
        for h in range(t.more.host_first[target], t.more.host_first[target + 1]):
            wake_sooner(t.more.hosts[h], ready, s)
    return started_at


def give_back(rank: int, time: float, t: Tables, s: ListState) -> float:
    """Takes what ops have freed by `time` off the memory that a rank and its stream share; returns when the next of
    those under way ends, NEVER where there is none.
    """
    soonest = NEVER
    row = t.ranks.holder[rank]
    while row >= 0:
        for place in range(t.ranks.own_first[row], t.ranks.own_first[row + 1]):
            q = t.ranks.own[place]
            if t.queues.late[q] == 0:
                continue
            while s.freed[q] < s.started[q]:
                ends_at = s.start_time[t.network.op_first[q] + s.freed[q]] + t.network.duration[q]
                if ends_at > time:
                    soonest = min(soonest, ends_at)
                    break
                s.freed[q] += 1
                for h in range(t.more.host_first[q], t.more.host_first[q + 1]):
                    holder = t.ranks.holder[t.more.hosts[h]]
                    s.memory[holder] += t.queues.memory[q]
                    s.in_flight[holder] += t.queues.count[q]
        row = t.ranks.beside[row] if row == t.ranks.holder[rank] else NOTHING
    return soonest


def note_turn(rank: int, kind: int, t: Tables, s: ListState) -> None:
    """Whose turn it is after an op of a class."""
    if kind != FORWARD and kind != BACKWARD:
        return
    if kind == FORWARD and s.warmup_left[rank] > 0:
        s.warmup_left[rank] -= 1
        s.turn[rank] = FORWARD
        s.turn_left[rank] = 0
    elif s.turn_left[rank] > 0 and s.turn[rank] == kind:
        s.turn_left[rank] -= 1
    else:
        unit = t.ranks.unit_forward[rank] if kind == FORWARD else t.ranks.unit_backward[rank]
        s.turn[rank] = kind
        s.turn_left[rank] = unit - 1


def note_interval(rank: int, q: int, t: Tables, s: ListState) -> None:
    """How far an interval has got after an op of queue `q` (whose count already includes it)."""
    slot = rank * NUM_CLASSES + t.queues.op_class[q]
    interval = t.slots.interval[slot]
    if interval <= 0:
        return
    first = t.slots.first[slot]
    current = t.slots.queues[first + s.position[slot]]
    if q == current and s.stepped[slot] < interval:
        s.stepped[slot] += 1
    elif s.stepped[slot] >= interval or not has_next(current, t, s):
        for place in range(first, t.slots.first[slot + 1]):
            if t.slots.queues[place] == q:
                s.position[slot] = place - first
        s.stepped[slot] = 1


def advance(rank: int, q: int, time: float, t: Tables, s: ListState) -> None:
    """Starts the next op of queue `q`, or lets the rank wait where that is NOTHING.

    A rank that waits may find something as its next op becomes ready, or, where it shares its memory with a stream,
    as an op frees some.
    """
    if q != NOTHING:
        begin(q, time, t, s)
        return
    soonest = NEVER
    if t.ranks.beside[rank] >= 0:
        soonest = give_back(rank, time, t, s)
    for place in range(t.ranks.own_first[rank], t.ranks.own_first[rank + 1]):
        ready = s.ready_at[t.ranks.own[place]]
        if time < ready < soonest:
            soonest = ready
    wake(rank, soonest, s)


def run(t: Tables, s: ListState) -> int:
    """Makes the rows. Returns how many ops started: fewer than all means that no rank can go on."""
    prepare(t, s)
    started = 0
    while True:
        time = s.tree[1]
        if time == NEVER:
            return started
        rank = least_of(s.tree, len(s.tree) // 2)
        if t.ranks.beside[rank] >= 0:
            give_back(rank, time, t, s)
        q = decide(rank, time, t, s)
        advance(rank, q, time, t, s)
        if q != NOTHING:
            started += 1
