"""List scheduling by rules: makes the rows of queues, deciding which queue a rank takes its next op from.

Like `decider`, plain functions over arrays that run as they stand or compiled, and know no clock: the time of
the decision is told. `decide` says what a rank would do, `begin` takes note that it does so; `run` drives both
through time until every op has its place.

A rank goes through its classes of ops in the order that its rules give (registered ops, then backward and
forward in the order of `mode` and units, then weight gradients), and through the queues of a class in the
order of the traversal. The first op that is ready and fits under the caps is the one.

`list_by_values` is the other list scheduler, and another algorithm: it knows nothing but a number for each op,
waits for better ones, and proves at each op that its rank can finish, thousands of times per search. Here
classes take turns, intervals and units are counted, several rows run one op, needs unlock windows, streams give
memory back late, and a user's function may be asked; room is kept by `reserves`, known ahead. Both are made of one
`Network`, find the rank that can go on first by `min_tree`, and the starts that they decide by are those of
`timing.Timer`, bit by bit. What merging more of them costs is measured in docs/engine.md.

The arrays are those of `rule_tables`: records by queue, rank, class slot and need, and lists of numbers. Rows are
laid out rank by rank: rank r's queue numbers are `rows[row_first[r]:row_first[r + 1]]`.
"""

from __future__ import annotations

import math

from penstock.engine.arrays import Floats, Ints
from penstock.engine.min_tree import fill, least_of, sift
from penstock.engine.needs import last_needed
from penstock.engine.rule_tables import (
    BACKWARD,
    FIRST,
    FORWARD,
    LAST,
    NUM_CLASSES,
    WEIGHT,
    Needs,
    Queues,
    Ranks,
    Slots,
)
from penstock.engine.tolerance import EPSILON

NOTHING = -1
NEVER = math.inf
BACKWARD_FIRST, FORWARD_FIRST, INTERLEAVED = 0, 1, 2
IN_ORDER, EARLIEST, BY_MICROBATCH = 0, 1, 2

READY, DONE, WAITS, FULL, STAGE_FULL, REFUSED = range(6)
"""Why the head of a queue can or can't start: see `standing`."""


def ready_time(q: int, queues: Queues, needs: Needs, start_time: Floats) -> float:
    """When the next op of queue `q` has all it needs; NEVER while something that it needs has not started."""
    index = queues[q].started
    if index >= queues[q].length:
        return NEVER
    latest = 0.0
    for n in range(queues[q].need_first, queues[q].need_last):
        source = needs[n].queue
        last = last_needed(index, needs[n].before, needs[n].after, needs[n].shift)
        if last < 0:
            continue
        if last >= queues[source].started:
            return NEVER
        ended = start_time[queues[source].first_op + last] + queues[source].duration
        latest = max(latest, ended + needs[n].delay)
    return latest


def standing(q: int, time: float, queues: Queues, ranks: Ranks, hosts: Ints) -> int:
    """Whether the next op of queue `q` could start at `time`, or why not."""
    if queues[q].ready_at > time:
        return WAITS if queues[q].started < queues[q].length else DONE
    if queues[q].memory > 0 or queues[q].count > 0:
        for h in range(queues[q].host_first, queues[q].host_last):
            rank = ranks[hosts[h]].holder
            needed = ranks[rank].memory + queues[q].memory + queues[q].reserve
            if needed > ranks[rank].cap_memory * (1 + EPSILON):
                return FULL
            in_flight = ranks[rank].in_flight + queues[q].count + queues[q].reserve_count
            if in_flight > ranks[rank].cap_count * (1 + EPSILON):
                return FULL
        release = queues[q].release
        if release >= 0 and queues[q].started - queues[release].started >= queues[q].cap:
            return STAGE_FULL
    return READY if queues[q].refused == 0 else REFUSED


def pick_in_class(
    rank: int,
    kind: int,
    time: float,
    queues: Queues,
    ranks: Ranks,
    slots: Slots,
    slot_queues: Ints,
    hosts: Ints,
) -> int:
    """The queue of one class that a rank would take, or NOTHING."""
    slot = rank * NUM_CLASSES + kind
    first, size = slots[slot].first, slots[slot].last - slots[slot].first
    if size == 0:
        return NOTHING
    pick = slots[slot].pick
    best = NOTHING
    begin_at = 0
    if slots[slot].interval > 0:
        begin_at = interval_position(slot, queues, slots, slot_queues)
        q = slot_queues[first + begin_at]
        if standing(q, time, queues, ranks, hosts) == READY:
            return q
        if slots[slot].hold != 0:
            return NOTHING
    for offset in range(size):
        at = begin_at + offset
        q = slot_queues[first + (at if at < size else at - size)]
        if standing(q, time, queues, ranks, hosts) != READY:
            continue
        if pick == IN_ORDER:
            return q
        if (
            best == NOTHING
            or (pick == EARLIEST and queues[q].ready_at < queues[best].ready_at)
            or (pick == BY_MICROBATCH and queues[q].started < queues[best].started)
        ):
            best = q
    return best


def interval_position(slot: int, queues: Queues, slots: Slots, slot_queues: Ints) -> int:
    """Where in its traversal a class slot stands: at the next queue with ops left once an interval is full."""
    first, size = slots[slot].first, slots[slot].last - slots[slot].first
    at = slots[slot].position
    q = slot_queues[first + at]
    if slots[slot].stepped < slots[slot].interval and queues[q].started < queues[q].length:
        return at
    for offset in range(1, size + 1):
        q = slot_queues[first + (at + offset) % size]
        if queues[q].started < queues[q].length:
            return (at + offset) % size
    return at


def has_left(rank: int, kind: int, queues: Queues, slots: Slots, slot_queues: Ints) -> bool:
    """Whether a rank still has ops of a class to start."""
    slot = rank * NUM_CLASSES + kind
    for s in range(slots[slot].first, slots[slot].last):
        q = slot_queues[s]
        if queues[q].started < queues[q].length:
            return True
    return False


def preferred(rank: int, ranks: Ranks) -> int:
    """BACKWARD or FORWARD: which of the two the rules want next."""
    if ranks[rank].turn_left > 0:
        return ranks[rank].turn
    if ranks[rank].mode == BACKWARD_FIRST:
        return BACKWARD
    if ranks[rank].mode == FORWARD_FIRST:
        return FORWARD
    return BACKWARD if ranks[rank].turn == FORWARD else FORWARD


def decide(rank: int, time: float, queues: Queues, ranks: Ranks, slots: Slots, slot_queues: Ints, hosts: Ints) -> int:
    """The queue whose next op the rank takes at `time`, or NOTHING."""
    if ranks[rank].warmup_left > 0:
        return pick_in_class(rank, FORWARD, time, queues, ranks, slots, slot_queues, hosts)
    q = pick_in_class(rank, FIRST, time, queues, ranks, slots, slot_queues, hosts)
    if q != NOTHING:
        return q
    kind = preferred(rank, ranks)
    q = pick_in_class(rank, kind, time, queues, ranks, slots, slot_queues, hosts)
    if q != NOTHING:
        return q
    if ranks[rank].strict == 0 or not has_left(rank, kind, queues, slots, slot_queues):
        other = FORWARD if kind == BACKWARD else BACKWARD
        q = pick_in_class(rank, other, time, queues, ranks, slots, slot_queues, hosts)
        if q != NOTHING:
            return q
    if ranks[rank].patience > 0 and comes_soon(rank, time, queues, ranks, slots, slot_queues, hosts):
        return NOTHING
    q = pick_in_class(rank, WEIGHT, time, queues, ranks, slots, slot_queues, hosts)
    if q != NOTHING:
        return q
    return pick_in_class(rank, LAST, time, queues, ranks, slots, slot_queues, hosts)


def comes_soon(
    rank: int, time: float, queues: Queues, ranks: Ranks, slots: Slots, slot_queues: Ints, hosts: Ints
) -> bool:
    """Whether a forward or backward that fits becomes ready within the rank's patience."""
    for kind in (BACKWARD, FORWARD):
        slot = rank * NUM_CLASSES + kind
        for s in range(slots[slot].first, slots[slot].last):
            q = slot_queues[s]
            ready = queues[q].ready_at
            if time < ready <= time + ranks[rank].patience and standing(q, ready, queues, ranks, hosts) == READY:
                return True
    return False


def begin(
    q: int,
    time: float,
    queues: Queues,
    ranks: Ranks,
    slots: Slots,
    slot_queues: Ints,
    hosts: Ints,
    needs: Needs,
    unlocks: Ints,
    start_time: Floats,
) -> float:
    """Starts the next op of queue `q`, decided on at `time`; returns when it starts.

    An op that several ranks run together starts when the last of them is free. Successors learn when they
    are ready, and the ranks concerned when to decide again.
    """
    started_at = time
    for h in range(queues[q].host_first, queues[q].host_last):
        started_at = max(started_at, ranks[hosts[h]].free_at)
    ends_at = started_at + queues[q].duration
    start_time[queues[q].first_op + queues[q].started] = started_at
    queues[q].started += 1
    for h in range(queues[q].host_first, queues[q].host_last):
        rank = hosts[h]
        ranks[rank].free_at = ends_at
        ranks[rank].wake = ends_at
        holder = ranks[rank].holder
        if queues[q].late == 0:
            ranks[holder].memory += queues[q].memory
            ranks[holder].in_flight += queues[q].count
        elif ranks[rank].beside >= 0:
            beside = ranks[rank].beside
            ranks[beside].wake = min(ranks[beside].wake, max(ends_at, ranks[beside].free_at))
        note_turn(rank, queues[q].op_class, ranks)
        note_interval(rank, q, queues, slots, slot_queues)
    queues[q].ready_at = ready_time(q, queues, needs, start_time)
    for u in range(queues[q].unlock_first, queues[q].unlock_last):
        target = unlocks[u]
        if queues[target].ready_at != NEVER:
            continue
        ready = ready_time(target, queues, needs, start_time)
        if ready == NEVER:
            continue
        queues[target].ready_at = ready
        for h in range(queues[target].host_first, queues[target].host_last):
            rank = hosts[h]
            ranks[rank].wake = min(ranks[rank].wake, max(ready, ranks[rank].free_at))
    return started_at


def give_back(
    rank: int, time: float, queues: Queues, ranks: Ranks, hosts: Ints, own: Ints, start_time: Floats
) -> float:
    """Takes what ops have freed by `time` off the memory that a rank and its stream share; returns when the next of
    those under way ends, NEVER where there is none.
    """
    soonest = NEVER
    row = ranks[rank].holder
    while row >= 0:
        for s in range(ranks[row].own_first, ranks[row].own_last):
            q = own[s]
            if queues[q].late == 0:
                continue
            while queues[q].freed < queues[q].started:
                ends_at = start_time[queues[q].first_op + queues[q].freed] + queues[q].duration
                if ends_at > time:
                    soonest = min(soonest, ends_at)
                    break
                queues[q].freed += 1
                for h in range(queues[q].host_first, queues[q].host_last):
                    holder = ranks[hosts[h]].holder
                    ranks[holder].memory += queues[q].memory
                    ranks[holder].in_flight += queues[q].count
        row = ranks[row].beside if row == ranks[rank].holder else NOTHING
    return soonest


def note_turn(rank: int, kind: int, ranks: Ranks) -> None:
    """Whose turn it is after an op of a class."""
    if kind != FORWARD and kind != BACKWARD:
        return
    if kind == FORWARD and ranks[rank].warmup_left > 0:
        ranks[rank].warmup_left -= 1
        ranks[rank].turn = FORWARD
        ranks[rank].turn_left = 0
    elif ranks[rank].turn_left > 0 and ranks[rank].turn == kind:
        ranks[rank].turn_left -= 1
    else:
        unit = ranks[rank].unit_forward if kind == FORWARD else ranks[rank].unit_backward
        ranks[rank].turn = kind
        ranks[rank].turn_left = unit - 1


def note_interval(rank: int, q: int, queues: Queues, slots: Slots, slot_queues: Ints) -> None:
    """How far an interval has got after an op of queue `q` (whose count already includes it)."""
    slot = rank * NUM_CLASSES + queues[q].op_class
    interval = slots[slot].interval
    if interval <= 0:
        return
    first = slots[slot].first
    current = slot_queues[first + slots[slot].position]
    if q == current and slots[slot].stepped < interval:
        slots[slot].stepped += 1
    elif slots[slot].stepped >= interval or queues[current].started >= queues[current].length:
        for s in range(first, slots[slot].last):
            if slot_queues[s] == q:
                slots[slot].position = s - first
        slots[slot].stepped = 1


def next_wake(
    rank: int, time: float, queues: Queues, ranks: Ranks, hosts: Ints, own: Ints, start_time: Floats
) -> float:
    """When a rank that found nothing at `time` may find something: as its next op becomes ready, or, where it shares
    its memory with a stream, as an op frees some.
    """
    soonest = NEVER
    if ranks[rank].beside >= 0:
        soonest = give_back(rank, time, queues, ranks, hosts, own, start_time)
    for s in range(ranks[rank].own_first, ranks[rank].own_last):
        ready = queues[own[s]].ready_at
        if time < ready < soonest:
            soonest = ready
    return soonest


def run(
    queues: Queues,
    ranks: Ranks,
    slots: Slots,
    slot_queues: Ints,
    hosts: Ints,
    needs: Needs,
    unlocks: Ints,
    own: Ints,
    start_time: Floats,
    rows: Ints,
    row_first: Ints,
    filled: Ints,
    tree: Floats,
) -> int:
    """Makes the rows. Returns how many ops started: fewer than all means that no rank can go on.

    Working space: `filled[rank]` is how long a row is, 0 at first; `tree` has `2 * leaves` entries,
    with `leaves` the power of two that holds all ranks: when each rank wakes, and the minima above.
    """
    for q in range(len(queues)):
        queues[q].ready_at = ready_time(q, queues, needs, start_time)
        if queues[q].ready_at < NEVER:
            for h in range(queues[q].host_first, queues[q].host_last):
                ranks[hosts[h]].wake = 0.0
    leaves = len(tree) // 2
    for leaf in range(leaves):
        tree[leaves + leaf] = ranks[leaf].wake if leaf < len(ranks) else NEVER
    fill(tree)
    started = 0
    while True:
        time = tree[1]
        if time == NEVER:
            return started
        rank = least_of(tree, leaves)
        if ranks[rank].beside >= 0:
            give_back(rank, time, queues, ranks, hosts, own, start_time)
        q = decide(rank, time, queues, ranks, slots, slot_queues, hosts)
        if q == NOTHING:
            ranks[rank].wake = next_wake(rank, time, queues, ranks, hosts, own, start_time)
            sift(tree, leaves + rank, ranks[rank].wake)
            continue
        begin(q, time, queues, ranks, slots, slot_queues, hosts, needs, unlocks, start_time)
        started += 1
        for h in range(queues[q].host_first, queues[q].host_last):
            host = hosts[h]
            rows[row_first[host] + filled[host]] = q
            filled[host] += 1
            sift(tree, leaves + host, ranks[host].wake)
            if ranks[host].beside >= 0:
                beside = ranks[host].beside
                sift(tree, leaves + beside, ranks[beside].wake)
        for u in range(queues[q].unlock_first, queues[q].unlock_last):
            target = unlocks[u]
            for h in range(queues[target].host_first, queues[target].host_last):
                sift(tree, leaves + hosts[h], ranks[hosts[h]].wake)
