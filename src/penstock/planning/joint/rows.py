"""Rows of ops whose forms vary: what they take and hold, whether they keep to the caps, and when they start.

`timed` is the engine's sweep (`engine.sweep`) over other arrays: rows grow and shrink with every move, and an
op of a stream stands in the row of its rank, for which a `Network` has no place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Flags, FloatRows, Floats, IntRows, Ints
from penstock.engine.tolerance import EPSILON

F, R, I, W, O, L = 0, 1, 2, 3, 4, 5
"""Kinds of ops. O, an offload, and L, its reload, run beside the others on the stream of their rank."""
WHOLE = 6
"""The column of `Ops.times` with the length of a B."""


class Ops(NamedTuple):
    """What is given. C chains over K ranks, n ops, M cells: a chain and one of its microbatches.

    Attributes:
        chain, kind, number, cell, rank: of each op; `number` counts the chain's microbatches.
        message_from, delay: the op on another stage that an op needs, or -1, and ms until its message is there.
        message_to: the same seen from the other side.
        first, size, cell_first: of each chain, its first op, its microbatches, its first cell.
        chain_rank, chain_first: of each chain; rank r has chains `chain_first[r]` to `chain_first[r + 1] - 1`.
        times: of each chain, ms of F, R, I, W, O, L and B.
        held, kept, freed: of each chain, what F holds, what it holds where R runs, and the share of it that I frees.
        may_again, may_whole, may_split, may_away: of each chain, the forms its microbatches may take.
        cap, host: most that each rank may hold, and have in host memory.
        num_kinds: how many ops a microbatch of a chain has at most.
    """

    chain: Ints
    kind: Ints
    number: Ints
    cell: Ints
    rank: Ints
    message_from: Ints
    delay: Floats
    message_to: Ints
    first: Ints
    size: Ints
    cell_first: Ints
    chain_rank: Ints
    chain_first: Ints
    times: FloatRows
    held: Floats
    kept: Floats
    freed: Floats
    may_again: Flags
    may_whole: Flags
    may_split: Flags
    may_away: Flags
    cap: Floats
    host: Floats
    num_kinds: int


class Orders(NamedTuple):
    """What is decided, and what follows from it.

    Attributes:
        row: of each rank, its ops in their order; `length` says how many there are.
        again, whole, away: of each cell.
        duration, change: of each op in its form: ms, and what it adds (at its start) to what its rank holds, or
            takes (at its end).
        place: of each op, where it stands in its row; -1 where it is not there.
        wait: of each op, that of its rank's stream whose end it waits for, or -1.
    """

    row: IntRows
    length: Ints
    again: Flags
    whole: Flags
    away: Flags
    duration: Floats
    change: Floats
    place: Ints
    wait: Ints


def set_form(p: Ops, o: Orders, c: int, j: int) -> None:
    """Writes the durations and memory of a cell's ops from its form."""
    cell, first, size = p.cell_first[c] + j, p.first[c] + j, p.size[c]
    held, kept = p.held[c], p.kept[c]
    again, whole = o.again[cell], o.whole[cell]
    for kind in range(p.num_kinds):
        o.duration[first + kind * size] = p.times[c, kind]
    if p.num_kinds > O:
        o.change[first + O * size] = -held
        o.change[first + L * size] = held
    if whole:
        o.duration[first + I * size] = p.times[c, WHOLE]
    o.change[first] = kept if again else held
    o.change[first + R * size] = held - kept
    o.change[first + I * size] = -held if whole else -p.freed[c] * held
    o.change[first + W * size] = (p.freed[c] - 1.0) * held


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
    """Starts every op of orders as soon as possible; returns the makespan, or -1 where ranks wait for one another.

    Ops that have no start are left at -1.
    """
    num_ranks = len(o.length)
    place, stack, stacked = (
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
    )
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
        makespan = max(makespan, free[r])
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
