"""Local search on fixed orders: neighbours on the critical path change places.

The makespan is a longest path. To shorten it some pair of ops that follow each other on a rank without a pause, on
that path, must change places (N1 of van Laarhoven, Aarts and Lenstra 1992). Pairs that cannot are left out: ops of
one queue, an op and the one it needs, and a forward behind what frees the memory it takes. These cut the path into
blocks, and only the first and the last pair of a block can help (N5 of Nowicki and Smutnicki 1996).

    rank 2  |  I4 W2 F7 |  I5 ...        critical: I4 and W2 may change, W2 and F7 not if the cap is full before W2

Simulated annealing picks a pair, exchanges it, and times again only what comes after: ops are kept in an order in
which each stands behind all it needs, so that one sweep from the pair on, over the ops marked as changed, is enough.
A worse order is kept with probability exp(-worse / temperature), else all is put back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Flags, Floats, IntRows, Ints
from penstock.engine.network import Network
from penstock.engine.tolerance import EPSILON
from penstock.planning.metropolis import Cooling, is_kept
from penstock.planning.metropolis import seed as seed

_NEAR = 1e-7
"""Milliseconds within which a path counts as longest."""


class WalkArrays(NamedTuple):
    """What a walk knows of n ops over R rows.

    Attributes:
        queue: of each op. needs: the two ops that each needs (message, local), and `after`, the two that need it.
        previous, following: of each op, its neighbours on its rank; `last` is each rank's last op.
        order, place: all ops, each behind all it needs, and where each stands there.
        start: when each op starts (ms). held: what its rank holds before it.
        pairs, moved, changed, old: working space of n numbers. mark, dirty: n flags, all False between moves.
    """

    queue: Ints
    needs: IntRows
    after: IntRows
    previous: Ints
    following: Ints
    last: Ints
    order: Ints
    place: Ints
    start: Floats
    held: Floats
    pairs: Ints
    moved: Ints
    changed: Ints
    old: Floats
    mark: Flags
    dirty: Flags

    @classmethod
    def of(cls, network: Network) -> WalkArrays:
        n = network.num_ops
        queue, previous, following, order, place, pairs, moved, changed = np.zeros((8, n), np.int64)
        needs, after = np.zeros((2, n, 2), np.int64)
        start, held, old = np.zeros((3, n))
        mark, dirty = np.zeros((2, n), np.bool_)
        last = np.zeros(network.num_ranks, np.int64)
        return cls(
            queue, needs, after, previous, following, last, order, place, start, held, pairs, moved, changed, old,
            mark, dirty,
        )  # fmt: skip


def lay_out(p: Network, w: WalkArrays) -> None:
    """Fills in what depends on the problem alone: `queue`, `needs` and `after`."""
    queue, needs, after = w.queue, w.needs, w.after
    for q in range(len(p.rank)):
        for j in range(p.size[q]):
            op = p.op_first[q] + j
            queue[op] = q
            needs[op, 0] = p.op_first[p.message_from[q]] + j if p.message_from[q] >= 0 else -1
            needs[op, 1] = p.op_first[p.local_from[q]] + j if p.local_from[q] >= 0 else -1
            after[op, 0] = p.op_first[p.message_to[q]] + j if p.message_to[q] >= 0 else -1
            after[op, 1] = p.op_first[p.local_to[q]] + j if p.local_to[q] >= 0 else -1


def load(p: Network, row: Ints, head: Ints, w: WalkArrays) -> None:
    """Reads orders: each op's neighbours on its rank, what the rank holds before it, each rank's last op."""
    previous, following, held, last = w.previous, w.following, w.held, w.last
    head[:] = 0
    for r in range(len(p.cap)):
        before, level = -1, 0.0
        for place in range(p.row_first[r], p.row_first[r + 1]):
            q = row[place]
            op = p.op_first[q] + head[q]
            head[q] += 1
            previous[op], following[op] = before, -1
            if before >= 0:
                following[before] = op
            held[op] = level
            level += p.memory[q]
            before = op
        last[r] = before


def line_up(p: Network, row: Ints, head: Ints, needs: IntRows, turn: Ints) -> None:
    """Numbers all ops so that each comes behind all it needs and the one before it on its rank."""
    turn[:] = -1
    head[:] = 0
    reached = np.empty(len(p.cap), np.int64)
    for r in range(len(p.cap)):
        reached[r] = p.row_first[r]
    count, going = 0, True
    while going:
        going = False
        for r in range(len(p.cap)):
            while reached[r] < p.row_first[r + 1]:
                q = row[reached[r]]
                op = p.op_first[q] + head[q]
                if (needs[op, 0] >= 0 and turn[needs[op, 0]] < 0) or (needs[op, 1] >= 0 and turn[needs[op, 1]] < 0):
                    break
                turn[op] = count
                count += 1
                head[q] += 1
                reached[r] += 1
                going = True


def unload(p: Network, w: WalkArrays, row: Ints) -> None:
    """The other way: writes the orders as queue ids."""
    queue, previous = w.queue, w.previous
    for r in range(len(p.cap)):
        op, place = w.last[r], p.row_first[r + 1] - 1
        while op >= 0:
            row[place] = queue[op]
            op = previous[op]
            place -= 1


def critical_pairs(p: Network, w: WalkArrays) -> int:
    """Walks one critical path from its end; returns how many ops on it may change places with the op before them.

    They are left in `pairs`. Where several paths are critical one is drawn by lot.
    """
    start, queue, needs, previous, held, last, pairs = w.start, w.queue, w.needs, w.previous, w.held, w.last, w.pairs
    op, longest = -1, -1.0
    for r in range(len(last)):
        if last[r] >= 0 and start[last[r]] + p.duration[queue[last[r]]] + p.tail[r] > longest:
            op = last[r]
            longest = start[op] + p.duration[queue[op]] + p.tail[r]
    count = 0
    while op >= 0:
        q = queue[op]
        time = start[op] - _NEAR
        if time <= 0.0:
            return ends_of_blocks(previous, pairs, count)
        message, local, before = needs[op, 0], needs[op, 1], previous[op]
        by_rank = before >= 0 and start[before] + p.duration[queue[before]] >= time
        by_message = message >= 0 and start[message] + p.duration[queue[message]] + p.delay[q] >= time
        if (
            by_rank
            and before != message
            and before != local
            and queue[before] != q
            and (p.memory[q] <= 0 or held[before] + p.memory[q] <= p.cap[p.rank[q]] * (1 + EPSILON))
        ):
            pairs[count] = op
            count += 1
        if by_rank and by_message and np.random.random() < 0.5:
            by_rank = False
        if by_rank:
            op = before
        elif by_message:
            op = message
        else:
            op = local
    return ends_of_blocks(previous, pairs, count)


def ends_of_blocks(previous: Ints, pairs: Ints, count: int) -> int:
    """Keeps the pairs that have no neighbour on one side."""
    kept = 0
    later = -1
    for k in range(count):
        op = pairs[k]
        inside = k + 1 < count and pairs[k + 1] == previous[op] and later >= 0 and previous[later] == op
        later = op
        if not inside:
            pairs[kept] = op
            kept += 1
    return kept


def reorder(w: WalkArrays, lead: int, trail: int) -> bool:
    """Brings `order` in line after `trail`, which stood right behind `lead` on its rank, went before it.

    What depends on `lead` among the ops between the two goes behind them, in the order it had. Returns False where
    `trail` depends on `lead` in some other way (which takes ops of no length): then the two must change back.
    """
    needs, previous, order, place, mark, moved = w.needs, w.previous, w.order, w.place, w.mark, w.moved
    possible = True
    write, count = place[lead], 1
    first, end = write + 1, place[trail]
    mark[lead] = True
    moved[0] = lead
    for at in range(first, end + 1):
        op = order[at]
        behind = (
            (needs[op, 0] >= 0 and mark[needs[op, 0]])
            or (needs[op, 1] >= 0 and mark[needs[op, 1]])
            or (previous[op] >= 0 and mark[previous[op]])
        )
        if behind:
            possible = possible and op != trail
            mark[op] = True
            moved[count] = op
            count += 1
        else:
            order[write] = op
            place[op] = write
            write += 1
    for k in range(count):
        op = moved[k]
        mark[op] = False
        order[write] = op
        place[op] = write
        write += 1
    return possible


def exchange(w: WalkArrays, r: int, lead: int, trail: int) -> None:
    """`trail`, right behind `lead` on rank r, goes before it."""
    previous, following, last = w.previous, w.following, w.last
    before, behind = previous[lead], following[trail]
    previous[trail], following[trail] = before, lead
    previous[lead], following[lead] = trail, behind
    if before >= 0:
        following[before] = trail
    if behind >= 0:
        previous[behind] = lead
    else:
        last[r] = lead


def timed_again(p: Network, w: WalkArrays, at: int, waiting: int) -> int:
    """Times again what has changed; returns how many starts did. They are left in `changed`, and what they were in
    `old`. Ops are marked ahead of the sweep by those they wait for.

    Args:
        at: the place in the order of the first op that is dirty. waiting: how many are.
    """
    queue, needs, after, previous, following = w.queue, w.needs, w.after, w.previous, w.following
    order, start, changed, old, dirty, duration = w.order, w.start, w.changed, w.old, w.dirty, p.duration
    num_changed = 0
    while waiting > 0:
        op = order[at]
        at += 1
        if not dirty[op]:
            continue
        dirty[op] = False
        waiting -= 1
        time = 0.0
        other = previous[op]
        if other >= 0:
            time = start[other] + duration[queue[other]]
        other = needs[op, 0]
        if other >= 0:
            time = max(time, start[other] + duration[queue[other]] + p.delay[queue[op]])
        other = needs[op, 1]
        if other >= 0:
            time = max(time, start[other] + duration[queue[other]])
        if time != start[op]:
            changed[num_changed] = op
            old[num_changed] = start[op]
            num_changed += 1
            start[op] = time
            other = following[op]
            if other >= 0 and not dirty[other]:
                dirty[other] = True
                waiting += 1
            for k in range(2):
                other = after[op, k]
                if other >= 0 and not dirty[other]:
                    dirty[other] = True
                    waiting += 1
    return num_changed


def anneal(
    p: Network, w: WalkArrays, now: float, best: float, best_row: Ints, cooling: Cooling
) -> tuple[float, float, int]:
    """Moves while the temperature falls; returns the makespan it ends with, the best one, whose order is in
    `best_row`, and the moves made: fewer at the target, where no pair is left, or where it is stopped.

    Args:
        now: the makespan of the orders given.
    """
    queue, previous, following, place, last = w.queue, w.previous, w.following, w.place, w.last
    start, held, dirty, pairs, changed, old = w.start, w.held, w.dirty, w.pairs, w.changed, w.old
    num_pairs = -1
    for move in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return now, best, move
        if num_pairs < 0:
            num_pairs = critical_pairs(p, w)
        if num_pairs == 0:
            return now, best, move
        trail = pairs[np.random.randint(num_pairs)]
        lead = previous[trail]
        r = p.rank[queue[lead]]
        behind = following[trail]
        exchange(w, r, lead, trail)
        if not reorder(w, lead, trail):
            exchange(w, r, trail, lead)
            continue
        dirty[trail] = dirty[lead] = True
        waiting = 2
        if behind >= 0:
            dirty[behind] = True
            waiting = 3
        num_changed = timed_again(p, w, place[trail], waiting)
        made = 0.0
        for other in range(len(last)):
            if last[other] >= 0:
                made = max(made, start[last[other]] + p.duration[queue[last[other]]] + p.tail[other])
        if is_kept(made - now, cooling, move):
            now = made
            num_pairs = -1
            held[trail] = held[lead]
            held[lead] = held[trail] + p.memory[queue[trail]]
            if now < best * (1 - 1e-12):
                best = now
                unload(p, w, best_row)
                if best <= cooling.target:
                    return now, best, move + 1
        else:
            for k in range(num_changed):
                start[changed[k]] = old[k]
            exchange(w, r, trail, lead)
            reorder(w, trail, lead)
    return now, best, cooling.num_moves
