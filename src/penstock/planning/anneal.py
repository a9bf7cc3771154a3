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

import numpy as np

from penstock.engine.arrays import FlagRows, Flags, FloatRows, Floats, IntRows, Ints, Stop
from penstock.engine.network import Network
from penstock.engine.tolerance import EPSILON
from penstock.planning.metropolis import is_kept
from penstock.planning.metropolis import seed as seed

_NEAR = 1e-7
"""Milliseconds within which a path counts as longest."""


def lay_out(p: Network, queue: Ints, needs: IntRows, after: IntRows) -> None:
    """Fills in what depends on the problem alone: the queue of each op, the two ops it needs (message, local), and
    the two that need it."""
    for q in range(len(p.rank)):
        for j in range(p.size[q]):
            op = p.op_first[q] + j
            queue[op] = q
            needs[op, 0] = p.op_first[p.message_from[q]] + j if p.message_from[q] >= 0 else -1
            needs[op, 1] = p.op_first[p.local_from[q]] + j if p.local_from[q] >= 0 else -1
            after[op, 0] = p.op_first[p.message_to[q]] + j if p.message_to[q] >= 0 else -1
            after[op, 1] = p.op_first[p.local_to[q]] + j if p.local_to[q] >= 0 else -1


def load(p: Network, row: Ints, head: Ints, previous: Ints, following: Ints, held: Floats, last: Ints) -> None:
    """Reads orders: each op's neighbours on its rank, what the rank holds before it, each rank's last op."""
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


def unload(p: Network, queue: Ints, previous: Ints, last: Ints, row: Ints) -> None:
    """The other way: writes the orders as queue ids."""
    for r in range(len(p.cap)):
        op, place = last[r], p.row_first[r + 1] - 1
        while op >= 0:
            row[place] = queue[op]
            op = previous[op]
            place -= 1


def critical_pairs(
    p: Network, start: Floats, queue: Ints, needs: IntRows, previous: Ints, held: Floats, last: Ints, pairs: Ints
) -> int:
    """Walks one critical path from its end; returns how many ops on it may change places with the op before them.

    They are left in `pairs`. Where several paths are critical one is drawn by lot.
    """
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


def reorder(
    lead: int, trail: int, needs: IntRows, previous: Ints, order: Ints, place: Ints, mark: Flags, moved: Ints
) -> bool:
    """Brings `order` in line after `trail`, which stood right behind `lead` on its rank, went before it.

    What depends on `lead` among the ops between the two goes behind them, in the order it had. Returns False where
    `trail` depends on `lead` in some other way (which takes ops of no length): then the two must change back.
    """
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


def exchange(lead: int, trail: int, previous: Ints, following: Ints) -> None:
    """`trail`, right behind `lead`, goes before it."""
    before, behind = previous[lead], following[trail]
    previous[trail], following[trail] = before, lead
    previous[lead], following[lead] = trail, behind
    if before >= 0:
        following[before] = trail
    if behind >= 0:
        previous[behind] = lead


def anneal(
    p: Network,
    queue: Ints,
    needs: IntRows,
    after: IntRows,
    ints: IntRows,
    floats: FloatRows,
    flags: FlagRows,
    last: Ints,
    num_moves: int,
    hot: float,
    cold: float,
    target: float,
    now: float,
    best: float,
    best_row: Ints,
    stop: Stop,
) -> tuple[float, float, int]:
    """Makes `num_moves` moves while the temperature falls from `hot` to `cold` ms; returns the makespan it ends with,
    the best one, whose order is in `best_row`, and the moves made: fewer at `target`, where no pair is left, or where
    `stop` is no longer 0.

    Args:
        ints: rows of n: previous, following (from `load`), order (ops by start), place in it, and working space of
            three rows.
        floats: rows of n: start, held (from `load`), and one row of working space.
        flags: two rows of n, all False.
        last: each rank's last op.
        now: the makespan of the orders given.
        stop: its one number is set by another thread when this one is to come to its end.
    """
    previous, following, order, place = ints[0], ints[1], ints[2], ints[3]
    pairs, moved, changed = ints[4], ints[5], ints[6]
    start, held, old = floats[0], floats[1], floats[2]
    mark, dirty = flags[0], flags[1]
    duration, delay, memory, rank = p.duration, p.delay, p.memory, p.rank
    num_pairs = -1
    for move in range(num_moves):
        if stop[0] != 0:
            return now, best, move
        if num_pairs < 0:
            num_pairs = critical_pairs(p, start, queue, needs, previous, held, last, pairs)
        if num_pairs == 0:
            return now, best, move
        trail = pairs[np.random.randint(num_pairs)]
        lead = previous[trail]
        r = rank[queue[lead]]
        behind = following[trail]
        exchange(lead, trail, previous, following)
        if behind < 0:
            last[r] = lead
        if not reorder(lead, trail, needs, previous, order, place, mark, moved):
            exchange(trail, lead, previous, following)
            if behind < 0:
                last[r] = trail
            continue
        # Time again what changes: ops are marked ahead of the sweep by those they wait for.
        dirty[trail] = dirty[lead] = True
        waiting, num_changed = 2, 0
        if behind >= 0:
            dirty[behind] = True
            waiting = 3
        at = place[trail]
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
                time = max(time, start[other] + duration[queue[other]] + delay[queue[op]])
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
        made = 0.0
        for other_rank in range(len(last)):
            if last[other_rank] >= 0:
                made = max(made, start[last[other_rank]] + duration[queue[last[other_rank]]] + p.tail[other_rank])
        worse = made - now
        if is_kept(worse, hot, cold, move / num_moves):
            now = made
            num_pairs = -1
            held[trail] = held[lead]
            held[lead] = held[trail] + memory[queue[trail]]
            if now < best * (1 - 1e-12):
                best = now
                unload(p, queue, previous, last, best_row)
                if best <= target:
                    return now, best, move + 1
        else:
            for k in range(num_changed):
                start[changed[k]] = old[k]
            exchange(trail, lead, previous, following)
            if behind < 0:
                last[r] = trail
            reorder(trail, lead, needs, previous, order, place, mark, moved)
    return now, best, num_moves
