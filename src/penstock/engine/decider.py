"""The decision core: which op a rank runs next. Events in, decisions out, over plain arrays.

It knows no clock, thread, socket or tensor. The simulator and the runtime drive these same functions, as
they stand here or compiled (see `compiled`), so what is simulated is what will run.

A rank decides by a policy:

    FROZEN        only the next op of its order, once all it needs is there
    HINTED        of the ready ops that fit, the earliest in its order: the plan is the priority, readiness the
                  permission
    CLASS_FIRST   of the ready ops that fit, B or I before F before W, ties by its order

Why no choice ends in a deadlock, whatever the policy and whatever comes late: take the first op of the frozen run
that has not started. All that it needs has run or is under way, it is at the head of its queue, and it is the next
in its rank's order. It fits, since no op is ever started that would leave its rank unable to finish in its order
within the cap (see `fits`). So some rank can always go on. A policy only says which of the ops that are
ready and fit is taken. A hinted rank may also wait for an op that is nearly due, up to a moment that is known (see
`wait_until`).
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.arrays import Floats, Ints
from penstock.engine.network import OpNetwork
from penstock.engine.tolerance import EPSILON

FROZEN, HINTED, CLASS_FIRST = 0, 1, 2
"""The policies of `decide`."""

NOTHING = -1


class RankState(NamedTuple):
    """What ranks have done and hold. A row is a rank, or the stream of one.

    Attributes:
        memory_change: of each op, what it adds to the activations held (at its start), or takes away (at its end).
        cap: of each row, most activations. It counts for ranks that do not follow their order.
        missing: of each op, how many of its needs are not met.
        done: of each op, 1 once it has started.
        head: of each queue, the place of its next op in `queue_ops`.
        next_frozen: of each row, the first op of its order that has not started.
        held: of each row, activations.
        warmup_left: of each row, how many forwards must still run before anything else may.
        under_way: of each rank, what the ops under way on it and its stream free when they end. None where ranks have
            no streams.
    """

    memory_change: Floats
    cap: Floats
    missing: Ints
    done: Ints
    head: Ints
    next_frozen: Ints
    held: Floats
    warmup_left: Ints
    under_way: Floats = None


def decide(policy: int, rank: int, p: OpNetwork, s: RankState) -> int:
    """The op that row `rank` starts now, or NOTHING if it waits.

    An op that several ranks run together is taken only when its turn in the frozen order has come, so that all
    of them take these ops in the same order.
    """
    op, missing = s.next_frozen[rank], s.missing
    is_next_ready = op < p.first[rank + 1] and missing[op] == 0
    if policy == FROZEN:
        return op if is_next_ready else NOTHING
    priority, memory_change = p.priority, s.memory_change
    only_forwards = s.warmup_left[rank] > 0
    if policy == HINTED and is_next_ready and (not only_forwards or priority[op] == 1):
        if memory_change[op] <= 0:  # the earliest of all, and nothing holds it back
            return op
        if s.under_way is None and fits(rank, op, s):
            return op
    head, queue_first, queue_ops, gang = s.head, p.queue_first, p.queue_ops, p.gang
    best = NOTHING
    for q in range(p.queue_rank_first[rank], p.queue_rank_first[rank + 1]):
        if head[q] == queue_first[q + 1]:
            continue
        op = queue_ops[head[q]]
        if missing[op] != 0 or (gang[op] >= 0 and op != s.next_frozen[rank]):
            continue
        if only_forwards and priority[op] != 1:
            continue
        if best != NOTHING and not is_preferred(policy, op, best, priority):
            continue
        if memory_change[op] > 0:
            if s.under_way is None:
                if not fits(rank, op, s):
                    continue
            elif not fits_beside(rank, op, p, s):
                continue
        best = op
    return best


def is_preferred(policy: int, op: int, other: int, priority: Ints) -> bool:
    """Whether a ready op is taken before another ready op of the same rank."""
    if policy == CLASS_FIRST and priority[op] != priority[other]:
        return priority[op] < priority[other]
    return op < other


def fits(rank: int, op: int, s: RankState) -> bool:
    """Whether `op`, run now, leaves the rank able to finish in frozen order under its cap.

    Running the op early raises the memory of every op that the frozen order has before it.
    """
    done, memory_change = s.done, s.memory_change
    level = s.held[rank] + memory_change[op]
    limit = s.cap[rank] + EPSILON * s.cap[rank]
    if level > limit:
        return False
    for earlier in range(s.next_frozen[rank], op):
        if done[earlier] == 0:
            level += memory_change[earlier]
            if level > limit:
                return False
    return True


def fits_beside(rank: int, op: int, p: OpNetwork, s: RankState) -> bool:
    """Whether `op` fits in the sense of `fits`, where ranks have streams.

    The order is that of rank and stream together, in which each op ends before the next one starts. Ops that are
    under way will end.
    """
    first, place, done, memory_change = p.first, p.place, s.done, s.memory_change
    num_ranks = (len(first) - 1) // 2
    holder = rank if rank < num_ranks else rank - num_ranks
    stream = holder + num_ranks
    level = s.held[holder] + s.held[stream] + memory_change[op]
    limit = s.cap[holder] + EPSILON * s.cap[holder]
    if level > limit:
        return False
    level += s.under_way[holder]
    own, apart = s.next_frozen[holder], s.next_frozen[stream]
    while True:
        has_own = own < first[holder + 1] and place[own] < place[op]
        has_apart = apart < first[stream + 1] and place[apart] < place[op]
        if has_own and (not has_apart or place[own] < place[apart]):
            earlier = own
            own += 1
        elif has_apart:
            earlier = apart
            apart += 1
        else:
            return True
        if done[earlier] == 0:
            level += memory_change[earlier]
            if level > limit:
                return False


def wait_until(rank: int, op: int, now: float, wait: float, due: Floats, duration: Floats, s: RankState) -> float:
    """The moment until which `rank` leaves a ready `op` for an earlier op of its order that is nearly due.

    It is `now` where there is none.

    Nearly due is an op whose planned start `due` comes no earlier than now, and before the share `wait` of `op`'s own
    duration is over: with a share of 1, `op` would run into it. Then, where `due` is when ops start in the frozen run
    over the same costs and delays, no op starts later than there: by induction, what an op needs is there when it is
    due, and nothing that came between is still running. An op that is overdue is not waited for, so every wait ends
    at a planned time, and then some op is taken: waiting adds no deadlock.
    """
    latest = now + wait * duration[op] - EPSILON
    for earlier in range(s.next_frozen[rank], op):
        if s.done[earlier] == 0 and now < due[earlier] + EPSILON and due[earlier] < latest:
            return due[earlier] + EPSILON
    return now


def start(rank: int, op: int, p: OpNetwork, s: RankState) -> None:
    """Notes that `rank` starts `op`: the op leaves its queue, and a forward's activation is held."""
    done, next_frozen, change = s.done, s.next_frozen, s.memory_change[op]
    done[op] = 1
    s.head[p.queue_of[op]] += 1
    while next_frozen[rank] < p.first[rank + 1] and done[next_frozen[rank]] == 1:
        next_frozen[rank] += 1
    if change > 0:
        s.held[rank] += change
    elif s.under_way is not None:
        s.under_way[rank % len(s.under_way)] += change
    if p.priority[op] == 1 and s.warmup_left[rank] > 0:
        s.warmup_left[rank] -= 1


def finish(rank: int, op: int, s: RankState) -> None:
    """Notes that `op` ended: the rank no longer holds what the op frees."""
    change = s.memory_change[op]
    if change < 0:
        s.held[rank] += change
        if s.under_way is not None:
            s.under_way[rank % len(s.under_way)] -= change
