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
within the cap (see `memory_safety`). So some rank can always go on. A policy only says which of the ops that are
ready and fit is taken. A hinted rank may also wait for an op that is nearly due, up to a moment that is known (see
`wait_until`).
"""

from __future__ import annotations

from penstock.engine.arrays import Floats, Ints
from penstock.engine.memory_safety import fits, fits_beside
from penstock.engine.tolerance import EPSILON

FROZEN, HINTED, CLASS_FIRST = 0, 1, 2
"""The policies of `decide`."""

NOTHING = -1


def decide(
    policy: int,
    rank: int,
    first: Ints,
    queue_rank_first: Ints,
    queue_first: Ints,
    queue_ops: Ints,
    head: Ints,
    priority: Ints,
    missing: Ints,
    done: Ints,
    next_frozen: Ints,
    memory_change: Floats,
    held: Floats,
    cap: Floats,
    warmup_left: Ints,
    gang: Ints,
    beside: Floats,
) -> int:
    """The op that `rank` starts now, NOTHING where it waits. `rank` is a row: a rank, or a stream.

    An op that several ranks run together is taken only when its turn in the frozen order has come, so that all
    of them take these in the same order.

    `head[q]` indexes `queue_ops`; `held[rank]` and `cap[rank]` are activations; `warmup_left[rank]` is how
    many forwards must still run before anything else may. Ops of a row are numbered in its order. `beside` is None
    where ranks have no streams, of which compiled code then contains nothing; else it says where each op stands in
    the order of its rank, those of the stream among the others, and then of each rank what the ops under way on it
    and its stream free when they end.
    """
    op = next_frozen[rank]
    is_next_ready = op < first[rank + 1] and missing[op] == 0
    if policy == FROZEN:
        return op if is_next_ready else NOTHING
    if policy == HINTED and is_next_ready and (warmup_left[rank] == 0 or priority[op] == 1):
        if memory_change[op] <= 0:  # the earliest of all, and nothing holds it back
            return op
        if beside is None and fits(rank, op, done, next_frozen, memory_change, held, cap):
            return op
    best = NOTHING
    for q in range(queue_rank_first[rank], queue_rank_first[rank + 1]):
        if head[q] == queue_first[q + 1]:
            continue
        op = queue_ops[head[q]]
        if missing[op] != 0 or (gang[op] >= 0 and op != next_frozen[rank]):
            continue
        if warmup_left[rank] > 0 and priority[op] != 1:
            continue
        if best != NOTHING and not is_preferred(policy, op, best, priority):
            continue
        if memory_change[op] > 0:
            if beside is None:
                if not fits(rank, op, done, next_frozen, memory_change, held, cap):
                    continue
            elif not fits_beside(rank, op, first, done, next_frozen, memory_change, held, cap, beside):
                continue
        best = op
    return best


def is_preferred(policy: int, op: int, other: int, priority: Ints) -> bool:
    """Whether a ready op is taken before another ready op of the same rank."""
    if policy == CLASS_FIRST and priority[op] != priority[other]:
        return priority[op] < priority[other]
    return op < other


def wait_until(
    rank: int, op: int, now: float, wait: float, due: Floats, duration: Floats, done: Ints, next_frozen: Ints
) -> float:
    """The moment until which `rank` leaves a ready `op` for an earlier op of its order that is nearly due.

    It is `now` where there is none.

    Nearly due is an op whose planned start `due` comes no earlier than now, and before the share `wait` of `op`'s own
    duration is over: with a share of 1, `op` would run into it. Then, where `due` is when ops start in the frozen run
    over the same costs and delays, no op starts later than there: by induction, what an op needs is there when it is
    due, and nothing that came between is still running. An op that is overdue is not waited for, so every wait ends
    at a planned time, and then some op is taken: waiting adds no deadlock.
    """
    latest = now + wait * duration[op] - EPSILON
    for earlier in range(next_frozen[rank], op):
        if done[earlier] == 0 and now < due[earlier] + EPSILON and due[earlier] < latest:
            return due[earlier] + EPSILON
    return now


def note_under_way(row: int, change: float, num_rows: int, num_ops: int, beside: Floats) -> None:
    """Where ranks have streams, takes note that an op starts that will free memory; that it ended, with `-change`."""
    beside[num_ops + row % (num_rows // 2)] += change


def start(
    rank: int,
    op: int,
    done: Ints,
    first: Ints,
    next_frozen: Ints,
    head: Ints,
    queue_of: Ints,
    priority: Ints,
    memory_change: Floats,
    held: Floats,
    warmup_left: Ints,
) -> None:
    """Takes note that `rank` starts `op`: it leaves its queue, and a forward's activation is held."""
    done[op] = 1
    head[queue_of[op]] += 1
    while next_frozen[rank] < first[rank + 1] and done[next_frozen[rank]] == 1:
        next_frozen[rank] += 1
    if memory_change[op] > 0:
        held[rank] += memory_change[op]
    if priority[op] == 1 and warmup_left[rank] > 0:
        warmup_left[rank] -= 1


def finish(rank: int, op: int, memory_change: Floats, held: Floats) -> None:
    """Takes note that `op` ended: what it frees is free."""
    if memory_change[op] < 0:
        held[rank] += memory_change[op]
