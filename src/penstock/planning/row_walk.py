"""Local search over rows of ops: moves on their order and on the forms they take, and simulated annealing with them.

    shift     an op on the critical path goes before those it waited behind; mostly two neighbours change places
    again     a forward runs again, its R right before its backward, or no longer does
    whole     an I and its W become a B, or the other way round
    away      a microbatch goes to host memory between its F and its I, by an O and an L (reload), or stays

Where a shift of a forward leaves too much held, a microbatch that is in flight there runs again or goes away. A move
changes one rank's row; what it makes of the makespan is found by timing all ops once more.

`timed` is the engine's sweep (`engine.sweep`) over other arrays: rows grow and shrink with every move, and an op of a
stream stands in the row of its rank, for which a `Network` has no place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Floats, Ints
from penstock.engine.tolerance import EPSILON
from penstock.planning.metropolis import Cooling, is_kept
from penstock.planning.metropolis import seed as seed
from penstock.planning.problem import WHOLE, I, L, O, Ops, Orders, R, W

CLOSE = 1e-7
"""Milliseconds within which a path counts as longest."""
PAIRS, PAIRS_IF_OPEN = 0.9, 0.5
"""How often a shift is of a pair that changes places; the second where ops may take other forms."""
ANYWHERE = 0.15
"""How often the op that moves is any, not one on a critical path."""


class WalkSpace(NamedTuple):
    """Where a walk stands, and working space.

    Attributes:
        start, trial: of each op, when it starts in the orders that count (ms), and in those that are tried.
        path, pairs: ops on a critical path, and those of them that may change places with the op before them.
        counts: how many of each there are.
    """

    start: Floats
    trial: Floats
    path: Ints
    pairs: Ints
    counts: Ints

    @classmethod
    def of(cls, ops: Ops) -> WalkSpace:
        num_ops = len(ops.chain)
        (start, trial), (path, pairs) = np.empty((2, num_ops)), np.empty((2, num_ops), np.int64)
        return cls(start, trial, path, pairs, np.zeros(2, np.int64))


def set_form(p: Ops, o: Orders, c: int, j: int) -> None:
    """Writes the durations and memory of a cell's ops from its form."""
    cell, first, size = p.cell_first[c] + j, p.first[c] + j, p.size[c]
    held, kept = p.forms.held[c], p.forms.kept[c]
    again, whole = o.again[cell], o.whole[cell]
    for kind in range(p.num_kinds):
        o.duration[first + kind * size] = p.forms.times[c, kind]
    if p.num_kinds > O:
        o.change[first + O * size] = -held
        o.change[first + L * size] = held
    if whole:
        o.duration[first + I * size] = p.forms.times[c, WHOLE]
    o.change[first] = kept if again else held
    o.change[first + R * size] = held - kept
    o.change[first + I * size] = -held if whole else -p.forms.freed[c] * held
    o.change[first + W * size] = (p.forms.freed[c] - 1.0) * held


def set_forms(p: Ops, o: Orders) -> None:
    """The same for all cells, and every op's place."""
    for c in range(len(p.size)):
        for j in range(p.size[c]):
            set_form(p, o, c, j)
    o.place[:] = -1
    for r in range(len(o.length)):
        for at in range(o.length[r]):
            o.place[o.row[r, at]] = at


def fits(p: Ops, o: Orders, r: int) -> bool:
    """Whether rank r keeps to its caps; then it is also noted what waits for its stream."""
    level, limit = 0.0, p.cap[r] * (1 + EPSILON)
    host, host_limit = 0.0, p.host[r] * (1 + EPSILON)
    for at in range(o.length[r]):
        op = o.row[r, at]
        o.level[op] = level
        level += o.change[op]
        if level > limit and o.change[op] > 0:
            return False
        if p.kind[op] >= O:
            # The stream runs one after the other, so what lies in host memory follows from its order alone.
            host -= o.change[op]
            if host > host_limit and p.kind[op] == O:
                return False
    if p.num_kinds > O:
        set_waits(p, o, r)
    return True


def set_waits(p: Ops, o: Orders, r: int) -> None:
    """Of each op of rank r, that of its stream whose end it waits for: its reload, or an offload whose room it needs,
    as `engine.memory.levels_at_most` has it. -1 for none but those that ops before it wait for."""
    stream = np.empty(o.length[r], np.int64)
    come_to, ended = 0, 0
    held, limit = 0.0, p.cap[r] * (1 + EPSILON)
    for at in range(o.length[r]):
        op = o.row[r, at]
        o.wait[op] = -1
        if p.kind[op] >= O:
            stream[come_to] = op
            come_to += 1
            continue
        before = ended
        if p.kind[op] == I and o.away[p.cell[op]]:
            size = p.size[p.chain[op]]
            for k in range(ended, come_to):
                if stream[k] == op + (L - I) * size:
                    while ended <= k:
                        held += o.change[stream[ended]]
                        ended += 1
                    break
        if o.change[op] > 0:
            there, more = held, ended
            while more <= come_to:
                if there + o.change[op] + _most(o, stream, more, come_to) <= limit:
                    ended, held = more, there
                    break
                if more < come_to:
                    there += o.change[stream[more]]
                more += 1
        held += o.change[op]
        if ended > before:
            o.wait[op] = stream[ended - 1]


def _most(o: Orders, stream: Ints, first: int, last: int) -> float:
    """Most that ops of a stream hold, from before the first to after the last."""
    held, most = 0.0, 0.0
    for k in range(first, last):
        held += o.change[stream[k]]
        most = max(most, held)
    return most


def timed(p: Ops, o: Orders, start: Floats) -> float:
    """Starts every op of orders as soon as possible; returns the makespan with tails, or -1 where ranks wait for one
    another.

    Ops that have no start are left at -1.
    """
    num_ranks = len(o.length)
    place = np.empty(num_ranks, np.int64)
    stack = np.empty(num_ranks, np.int64)
    stacked = np.empty(num_ranks, np.int64)
    free = np.empty(2 * num_ranks)
    row, duration, message_from, message_to = o.row, o.duration, p.message_from, p.message_to
    start[:] = -1.0
    missing = 0
    for r in range(num_ranks):
        place[r] = 0
        free[r] = 0.0
        free[num_ranks + r] = 0.0
        stack[r] = num_ranks - 1 - r
        stacked[r] = 1
        missing += o.length[r]
    depth, makespan = num_ranks, 0.0
    while depth > 0:
        depth -= 1
        r = stack[depth]
        stacked[r] = 0
        while place[r] < o.length[r]:
            op = row[r, place[r]]
            time = free[r]
            if p.kind[op] >= O:
                start[op] = max(time, free[num_ranks + r])
                free[num_ranks + r] = start[op] + duration[op]
                place[r] += 1
                missing -= 1
                continue
            before = o.wait[op]
            if before >= 0:
                time = max(time, start[before] + duration[before])
            before = message_from[op]
            if before >= 0:
                if start[before] < 0:
                    break
                time = max(time, start[before] + duration[before] + p.delay[op])
            start[op] = time
            free[r] = time + duration[op]
            place[r] += 1
            missing -= 1
            after = message_to[op]
            if after >= 0:
                other = p.rank[after]
                if (
                    other != r
                    and stacked[other] == 0
                    and place[other] < o.length[other]
                    and row[other, place[other]] == after
                ):
                    stack[depth] = other
                    stacked[other] = 1
                    depth += 1
        makespan = max(makespan, free[r] + p.tail[r])
    return makespan if missing == 0 else -1.0


def take_out(o: Orders, r: int, op: int) -> None:
    """Removes an op from its row."""
    at = o.place[op]
    for k in range(at, o.length[r] - 1):
        o.row[r, k] = o.row[r, k + 1]
        o.place[o.row[r, k]] = k
    o.length[r] -= 1
    o.place[op] = -1


def put_in(o: Orders, r: int, op: int, at: int) -> None:
    """Inserts an op into a row, at place `at`."""
    for k in range(o.length[r], at, -1):
        o.row[r, k] = o.row[r, k - 1]
        o.place[o.row[r, k]] = k
    o.row[r, at] = op
    o.place[op] = at
    o.length[r] += 1


def may_pass(p: Ops, o: Orders, lead: int, trail: int) -> bool:
    """Whether `trail`, right behind `lead` on its rank, may go before it, memory and other ranks apart."""
    if p.message_from[trail] == lead:
        return False
    if p.chain[lead] != p.chain[trail]:
        return True
    if p.number[lead] == p.number[trail] or p.kind[lead] == p.kind[trail]:
        return False
    whole_lead = p.kind[lead] == I and o.whole[p.cell[lead]]
    whole_trail = p.kind[trail] == I and o.whole[p.cell[trail]]
    return not ((whole_lead and p.kind[trail] == W) or (whole_trail and p.kind[lead] == W))


def run_again(p: Ops, o: Orders, c: int, j: int) -> None:
    """A forward that was kept runs again, before its backward and later R; or one that ran again is kept. Its
    microbatch is not away."""
    r, cell = p.chain_rank[c], p.cell_first[c] + j
    op = p.first[c] + R * p.size[c] + j
    if o.again[cell]:
        take_out(o, r, op)
    else:
        at = o.place[p.first[c] + I * p.size[c] + j]
        for later in range(1, p.size[c] - j):  # those of later microbatches may stand before this backward
            if o.place[op + later] >= 0:
                at = min(at, o.place[op + later])
        put_in(o, r, op, at)
    o.again[cell] = not o.again[cell]
    set_form(p, o, c, j)


def send_away(p: Ops, o: Orders, c: int, j: int) -> None:
    """A microbatch whose forward does not run again goes to host memory right after its F and comes back a little
    before its I, each in its turn; or one that did stays."""
    r, size, cell = p.chain_rank[c], p.size[c], p.cell_first[c] + j
    out, back = p.first[c] + O * size, p.first[c] + L * size
    if o.away[cell]:
        take_out(o, r, out + j)
        take_out(o, r, back + j)
    else:
        at = o.place[p.first[c] + j]
        for k in range(j):
            at = max(at, o.place[out + k])
        put_in(o, r, out + j, at + 1)
        low, high = at + 2, o.place[p.first[c] + I * size + j]
        for k in range(size):
            if o.place[back + k] >= 0:
                if k < j:
                    low = max(low, o.place[back + k] + 1)
                else:
                    high = min(high, o.place[back + k])
        put_in(o, r, back + j, max(low, high - np.random.randint(5)))
    o.away[cell] = not o.away[cell]
    set_form(p, o, c, j)


def run_whole(p: Ops, o: Orders, c: int, j: int) -> bool:
    """A backward in halves becomes whole, or the other way round; False where the order of its queues forbids it."""
    r, size, cell = p.chain_rank[c], p.size[c], p.cell_first[c] + j
    back, weight = p.first[c] + I * size + j, p.first[c] + W * size + j
    if o.whole[cell]:
        put_in(o, r, weight, o.place[back] + 1)
    else:
        earlier = -1
        for k in range(j):
            other = p.first[c] + W * size + k
            earlier = max(earlier, o.place[other])
        if earlier < o.place[back]:
            take_out(o, r, weight)
        elif j + 1 == size or o.place[weight] < o.place[back + 1]:
            at = o.place[weight]
            take_out(o, r, weight)
            take_out(o, r, back)
            put_in(o, r, back, at - 1)
        else:
            return False
    o.whole[cell] = not o.whole[cell]
    set_form(p, o, c, j)
    return True


def in_flight(p: Ops, o: Orders, r: int, at: int) -> int:
    """One cell, drawn by lot, that rank r holds all of at place `at` and that may run again or go away; -1 where none
    is."""
    chosen, count = -1, 0
    for c in range(p.chain_first[r], p.chain_first[r + 1]):
        if (not p.forms.may_again[c] or p.forms.kept[c] >= p.forms.held[c]) and not p.forms.may_away[c]:
            continue
        for j in range(p.size[c]):
            forward, back, cell = p.first[c] + j, p.first[c] + I * p.size[c] + j, p.cell_first[c] + j
            if o.place[forward] <= at and o.place[back] > at and not o.again[cell] and not o.away[cell]:
                count += 1
                if np.random.randint(count) == 0:
                    chosen = forward
    return chosen


def critical(p: Ops, o: Orders, w: WalkSpace) -> None:
    """Walks one critical path from its end, and notes its ops and pairs; one drawn by lot where there are several.

    Pairs are ops that follow each other on a rank without a pause (N1 of van Laarhoven, Aarts and Lenstra 1992).
    Those that cannot change places are left out: ops of one queue, an op and the one it needs, and a forward behind
    what frees the memory it takes, unless another form may give room.
    """
    start, path, pairs = w.start, w.path, w.pairs
    op, longest = -1, -1.0
    for r in range(len(o.length)):
        if o.length[r] > 0:
            last = o.row[r, o.length[r] - 1]
            end = start[last] + o.duration[last] + p.tail[r]
            if end > longest + CLOSE or (end > longest - CLOSE and np.random.random() < 0.5):
                op, longest = last, end
    count, num_pairs = 0, 0
    while op >= 0:
        path[count] = op
        count += 1
        time = start[op] - CLOSE
        if time <= 0.0:
            break
        before, beside = -1, -1
        """What stands before it on its rank, and on its stream where it is there."""
        r, at = p.rank[op], o.place[op] - 1
        while at >= 0 and (before < 0 or (p.kind[op] >= O and beside < 0)):
            if p.kind[o.row[r, at]] >= O:
                if beside < 0:
                    beside = o.row[r, at]
            elif before < 0:
                before = o.row[r, at]
            at -= 1
        if p.kind[op] < O:
            beside = o.wait[op]
        message = p.message_from[op]
        following, ways = -1, 0
        if before >= 0 and start[before] + o.duration[before] >= time:
            following, ways = before, 1
            has_room = o.change[op] <= 0 or o.level[before] + o.change[op] <= p.cap[r] * (1 + EPSILON)
            if (has_room or p.forms.is_open) and may_pass(p, o, before, op):
                pairs[num_pairs] = op
                num_pairs += 1
        if message >= 0 and start[message] + o.duration[message] + p.delay[op] >= time:
            ways += 1
            if ways == 1 or np.random.random() < 0.5:
                following = message
        if beside >= 0 and start[beside] + o.duration[beside] >= time:
            ways += 1
            if np.random.randint(ways) == 0:
                following = beside
        op = following
    w.counts[0], w.counts[1] = count, ends_of_blocks(p, o, pairs, num_pairs)


def ends_of_blocks(p: Ops, o: Orders, pairs: Ints, count: int) -> int:
    """Keeps the pairs that have no neighbour on one side: only the first and the last of a block can help (N5 of
    Nowicki and Smutnicki 1996). Returns how many there are."""
    kept, later = 0, -1
    for k in range(count):
        op = pairs[k]
        r, at = p.rank[op], o.place[op]
        inside = (
            k + 1 < count
            and at > 0
            and pairs[k + 1] == o.row[r, at - 1]
            and later >= 0
            and p.rank[later] == r
            and o.place[later] == at + 1
        )
        later = op
        if not inside:
            pairs[kept] = op
            kept += 1
    return kept


def drawn(o: Orders, w: WalkSpace, anywhere: bool) -> int:
    """An op on the critical path, or any that is there."""
    if not anywhere:
        return w.path[np.random.randint(w.counts[0])]
    op = -1
    while op < 0:
        op = np.random.randint(len(o.place))
        if o.place[op] < 0:
            op = -1
    return op


def change(p: Ops, o: Orders, w: WalkSpace) -> int:
    """Makes one move on orders that keep to all rules; returns its rank, or -1 - rank where it is not allowed."""
    anywhere = np.random.random() < ANYWHERE
    op = drawn(o, w, anywhere)
    if p.forms.is_open and np.random.random() < 0.35:
        r, c, j, kind = p.rank[op], p.chain[op], p.number[op], p.kind[op]
        cell = p.cell_first[c] + j
        if p.forms.may_again[c] and (kind == R or (kind != W and (anywhere or np.random.random() < 0.3))):
            if o.away[cell]:
                send_away(p, o, c, j)
            run_again(p, o, c, j)
            return r if fits(p, o, r) else -1 - r
        if p.forms.may_away[c] and kind != W and kind != R and np.random.random() < 0.3:
            if o.again[cell]:
                run_again(p, o, c, j)
            send_away(p, o, c, j)
            return r if fits(p, o, r) else -1 - r
        if kind in (I, W) and (p.forms.may_split[c] if o.whole[cell] else p.forms.may_whole[c]):
            return r if run_whole(p, o, c, j) and fits(p, o, r) else -1 - r
    if w.counts[1] > 0 and np.random.random() < (PAIRS_IF_OPEN if p.forms.is_open else PAIRS):
        return shift(p, o, w.pairs[np.random.randint(w.counts[1])], 1, False)
    far = 1 if np.random.random() < 0.6 else 1 + np.random.randint(6)
    return shift(p, o, op, far, anywhere and np.random.random() < 0.5)


def shift(p: Ops, o: Orders, op: int, far: int, late: bool) -> int:
    """Moves an op past up to `far` others of its row, to the front or `late`; returns what `change` does."""
    r, at, moved = p.rank[op], o.place[op], 0
    while moved < far:
        to = at + 1 if late else at - 1
        if to < 0 or to >= o.length[r]:
            break
        other = o.row[r, to]
        if not (may_pass(p, o, op, other) if late else may_pass(p, o, other, op)):
            break
        o.row[r, at], o.row[r, to] = other, op
        o.place[other], o.place[op] = at, to
        at = to
        moved += 1
    if moved == 0:
        return -1 - r
    if fits(p, o, r):
        return r
    for _ in range(2 if p.forms.is_open else 0):
        held = in_flight(p, o, r, at)
        if held < 0:
            return -1 - r
        other = p.chain[held]
        if p.forms.may_away[other] and (
            not p.forms.may_again[other] or p.forms.kept[other] >= p.forms.held[other] or np.random.random() < 0.5
        ):
            send_away(p, o, other, p.number[held])
        else:
            run_again(p, o, other, p.number[held])
        if fits(p, o, r):
            return r
    return -1 - r


def anneal(
    p: Ops, o: Orders, undo: Orders, best_orders: Orders, w: WalkSpace, now: float, best: float, cooling: Cooling
) -> tuple[float, float, int]:
    """Moves while the temperature falls; returns the makespan it ends with, the best one, whose orders are in
    `best_orders`, and the moves made: fewer at the target, where no pair is left and no form is open, or where it is
    stopped.

    Args:
        o: the orders to begin with, and to end with. undo: a copy of them.
        w: its `start` is that of `o`.
        now: the makespan of `o`. best: that of `best_orders`.
    """
    found = False
    for move in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return now, best, move
        if not found:
            critical(p, o, w)
            found = True
        if w.counts[1] == 0 and not p.forms.is_open:
            return now, best, move
        r = change(p, o, w)
        allowed = r >= 0
        if not allowed:
            r = -1 - r
        made = timed(p, o, w.trial) if allowed else -1.0
        if made >= 0 and is_kept(made - now, cooling, move):
            now = made
            found = False
            w.start[:] = w.trial
            copy_rank(p, o, undo, r)
            if now < best * (1 - 1e-12):
                best = now
                for each in range(len(p.cap)):
                    copy_rank(p, o, best_orders, each)
                if best <= cooling.target:
                    return now, best, move + 1
        else:
            copy_rank(p, undo, o, r)
    return now, best, cooling.num_moves


def copy_rank(p: Ops, source: Orders, target: Orders, r: int) -> None:
    """Writes what a move on rank r may have changed over other orders."""
    target.length[r] = source.length[r]
    for at in range(source.length[r]):
        target.row[r, at] = source.row[r, at]
    for c in range(p.chain_first[r], p.chain_first[r + 1]):
        first, cells = p.first[c], p.cell_first[c]
        for k in range(p.size[c]):
            target.again[cells + k] = source.again[cells + k]
            target.whole[cells + k] = source.whole[cells + k]
            target.away[cells + k] = source.away[cells + k]
        for op in range(first, first + p.num_kinds * p.size[c]):
            target.wait[op] = source.wait[op]
            target.duration[op] = source.duration[op]
            target.change[op] = source.change[op]
            target.place[op] = source.place[op]
            target.level[op] = source.level[op]
