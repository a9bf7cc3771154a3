"""The decision core: which op a rank runs next. Events in, decisions out, over plain arrays.

It knows no clock, thread, socket or tensor. The simulator and the runtime drive these same functions, as
they stand here or compiled (see `compiled`), so what is simulated is what will run.

A rank is frozen (it follows its order exactly) or dynamic (it runs any ready op by priority, B or I, then
F, then W, each queue in its own order, ties by the frozen order). A dynamic rank never runs an F that could
leave it unable to finish in the frozen order within its memory cap; since the frozen order as a whole
completes, some rank can always go on, and no choice made here ends in a deadlock.
"""

from __future__ import annotations

from typing import Any

Array = Any
"""A list or an array of numbers, indexed by op, queue or rank."""

NOTHING = -1
EPSILON = 1e-9
"""Slack on memory caps, as a share of the cap, for sums of floats."""


def choose_frozen(rank: int, first: Array, next_frozen: Array, missing: Array) -> int:
    """The next op of the frozen order if all it needs is there, else NOTHING."""
    op = next_frozen[rank]
    if op < first[rank + 1] and missing[op] == 0:
        return op
    return NOTHING


def choose_dynamic(
    rank: int,
    queue_rank_first: Array,
    queue_first: Array,
    queue_ops: Array,
    head: Array,
    priority: Array,
    missing: Array,
    done: Array,
    next_frozen: Array,
    memory_change: Array,
    held: Array,
    cap: Array,
    warmup_left: Array,
    gang: Array,
) -> int:
    """The ready op of highest priority that is safe for memory, else NOTHING.

    An op that several ranks run together is taken only when its turn in the frozen order has come, so that all
    of them take these in the same order.

    `head[q]` indexes `queue_ops`; `held[rank]` and `cap[rank]` are activations; `warmup_left[rank]` is how
    many forwards must still run before anything else may.
    """
    best = NOTHING
    for q in range(queue_rank_first[rank], queue_rank_first[rank + 1]):
        if head[q] == queue_first[q + 1]:
            continue
        op = queue_ops[head[q]]
        if missing[op] != 0 or (gang[op] >= 0 and op != next_frozen[rank]):
            continue
        if warmup_left[rank] > 0 and priority[op] != 1:
            continue
        if best != NOTHING and (priority[op], op) > (priority[best], best):
            continue
        if memory_change[op] > 0 and not fits(rank, op, done, next_frozen, memory_change, held, cap):
            continue
        best = op
    return best


def fits(rank: int, op: int, done: Array, next_frozen: Array, memory_change: Array, held: Array, cap: Array) -> bool:
    """Whether `op`, run now, leaves the rank able to finish in frozen order under its cap.

    Running it early raises the memory of every op that the frozen order has before it.
    """
    level = held[rank] + memory_change[op]
    limit = cap[rank] + EPSILON * cap[rank]
    if level > limit:
        return False
    for earlier in range(next_frozen[rank], op):
        if done[earlier] == 0:
            level += memory_change[earlier]
            if level > limit:
                return False
    return True


def start(
    rank: int,
    op: int,
    done: Array,
    first: Array,
    next_frozen: Array,
    head: Array,
    queue_of: Array,
    priority: Array,
    memory_change: Array,
    held: Array,
    warmup_left: Array,
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


def finish(rank: int, op: int, memory_change: Array, held: Array) -> None:
    """Takes note that `op` ended: what it frees is free."""
    if memory_change[op] < 0:
        held[rank] += memory_change[op]
