"""Local search over one sequence of all ops, for any network: stages that join, ops that several rows run at once.

A sequence holds every op once, behind all that it needs. Each row runs its ops in that order, and each op starts as
soon as its rows and its needs allow; so no sequence ends in a deadlock, and those who run an op together agree on it.

    sequence    E0 F0 G0 E1 H0 ...        E and H on rows 0 and 1, F on row 0, G on row 1
    row 0     | E0 F0    E1 H0
    row 1     | E0    G0 E1 H0

The makespan is a longest path. A move takes an op on it that waits for its row alone, and puts it before the op ahead
of it there, or before one further ahead, together with what it needs in between; or it puts that other op, with what
needs it, behind.

`placed` finds the starts that `engine.sweep` finds, and besides, what each op waited for last, which the next move
begins at. It needs no stack of rows, since a sequence already says in which order they are gone through.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import FloatRows, Floats, IntRows, Ints
from penstock.engine.needs import last_needed
from penstock.engine.network import Irregularities, Network
from penstock.engine.tolerance import EPSILON
from penstock.planning.metropolis import Cooling, is_kept
from penstock.planning.metropolis import seed as seed

_FURTHER = 0.3
"""How often an op moves past one more op of its row."""
_ANYWHERE = 0.1
"""How often the op is any, not one that the makespan depends on."""
_HUGE = 1_000_000_000_000_000_000
"""More than any number of ops."""


class Placed(NamedTuple):
    """What ops hold, where those of a sequence are placed, and working space.

    Attributes:
        takes, gives: per queue, what an op adds to what each of its rows holds, at its start, and takes away, at its
            end. cap: of each row.
        start: per op, ms. position: per op, its place in the sequence.
        cause: per place of the sequence, the place of what it waited for last; -1 where it began at 0.
        ahead: per place, that of the op before it on one of its rows, -1 where it is the first.
        number: per place, which op of its queue it is.
        last: of each row, the place of its last op; behind the rows one more: the place of what ends last.
        queues: three rows of one number per queue. rows: two rows of one number per row.
    """

    takes: Floats
    gives: Floats
    cap: Floats
    start: Floats
    position: Ints
    cause: Ints
    ahead: Ints
    number: Ints
    last: Ints
    queues: IntRows
    rows: FloatRows

    @classmethod
    def of(cls, network: Network, takes: Floats, gives: Floats, cap: Floats) -> Placed:
        num_rows, start = len(cap), np.empty(network.num_ops)
        position, cause, ahead, number = np.empty((4, network.num_ops), np.int64)
        last, queues = np.empty(num_rows + 1, np.int64), np.empty((3, len(network.rank)), np.int64)
        queues[1], queues[2] = -1, _HUGE
        rows = np.empty((2, num_rows))
        return cls(takes, gives, cap, start, position, cause, ahead, number, last, queues, rows)


def placed(p: Network, more: Irregularities, sequence: Ints, s: Placed) -> float:
    """Starts all ops of a sequence; returns the makespan (ms), or -1 where an op comes before what it needs, or takes
    a row above its cap.

    Args:
        p, more: `Network` and `Irregularities`; all needs are said in the latter.
        sequence: queue ids.
        s: out, all but what ops hold.
    """
    takes, gives, cap = s.takes, s.gives, s.cap
    start, cause, ahead, number = s.start, s.cause, s.ahead, s.number
    position, last, head, free, held = s.position, s.last, s.queues[0], s.rows[0], s.rows[1]
    num_rows = len(cap)
    head[:] = 0
    last[:] = -1
    free[:] = 0.0
    held[:] = 0.0
    makespan = 0.0
    for k in range(len(sequence)):
        q = sequence[k]
        j = head[q]
        time, why, before_it = 0.0, -1, -1
        for n in range(more.need_first[q], more.need_first[q + 1]):
            source = more.need_queue[n]
            index = last_needed(j, more.before[n], more.after[n])
            if head[source] <= index:
                return -1.0
            op = p.op_first[source] + index
            arrives = start[op] + p.duration[source] + more.need_delay[n]
            if arrives > time:
                time, why = arrives, position[op]
        for h in range(more.host_first[q], more.host_first[q + 1]):
            r = more.hosts[h]
            if takes[q] > 0 and held[r] + takes[q] > cap[r] * (1 + EPSILON):
                return -1.0
            if last[r] >= 0:
                if before_it < 0 or free[r] >= time:
                    before_it = last[r]
                if free[r] > time or (free[r] == time and (why < 0 or np.random.random() < 0.5)):
                    time, why = free[r], last[r]
        ends = time + p.duration[q]
        for h in range(more.host_first[q], more.host_first[q + 1]):
            r = more.hosts[h]
            free[r], last[r] = ends, k
            held[r] += takes[q] - gives[q]
        op = p.op_first[q] + j
        start[op], position[op] = time, k
        cause[k], ahead[k], number[k] = why, before_it, j
        head[q] = j + 1
        if ends > makespan:
            makespan, last[num_rows] = ends, k
    return makespan


def moved_forward(
    more: Irregularities, sequence: Ints, number: Ints, y: int, x: int, upto: Ints, trial: Ints
) -> bool:
    """Puts the op at place x before that at y, with all between them that it needs; False where it needs y.

    Args:
        upto: working space, -1 for every queue, and so it is left. trial: out, the sequence.
    """
    marked, possible = 0, True
    for k in range(x, y - 1, -1):
        q, j = sequence[k], number[k]
        if k == x or upto[q] >= j:
            if k == y:
                possible = False
                break
            marked += 1
            upto[q] = max(upto[q], j)
            for n in range(more.need_first[q], more.need_first[q + 1]):
                source = more.need_queue[n]
                upto[source] = max(upto[source], last_needed(j, more.before[n], more.after[n]))
    if possible:
        front, rest = y, y + marked
        for k in range(y, x + 1):
            if upto[sequence[k]] >= number[k]:
                trial[front] = sequence[k]
                front += 1
            else:
                trial[rest] = sequence[k]
                rest += 1
    for k in range(y, x + 1):
        q = sequence[k]
        upto[q] = -1
        for n in range(more.need_first[q], more.need_first[q + 1]):
            upto[more.need_queue[n]] = -1
    return possible


def moved_back(more: Irregularities, sequence: Ints, number: Ints, y: int, x: int, least: Ints, trial: Ints) -> bool:
    """Puts the op at place y behind that at x, with all between them that needs it; False where x does.

    Args:
        least: working space, larger than any number for every queue, and so it is left. trial: out, the sequence.
    """
    marked, possible = 0, True
    for k in range(y, x + 1):
        q, j = sequence[k], number[k]
        behind = k == y or least[q] <= j
        if not behind:
            for n in range(more.need_first[q], more.need_first[q + 1]):
                if least[more.need_queue[n]] <= last_needed(j, more.before[n], more.after[n]):
                    behind = True
        if behind:
            if k == x:
                possible = False
                break
            marked += 1
            least[q] = min(least[q], j)
    if possible:
        front, rest = y, x + 1 - marked
        for k in range(y, x + 1):
            if least[sequence[k]] <= number[k]:
                trial[rest] = sequence[k]
                rest += 1
            else:
                trial[front] = sequence[k]
                front += 1
    for k in range(y, x + 1):
        least[sequence[k]] = _HUGE
    return possible


def walk(
    p: Network,
    more: Irregularities,
    sequence: Ints,
    trial: Ints,
    now: Placed,
    then: Placed,
    best: float,
    best_sequence: Ints,
    cooling: Cooling,
) -> tuple[float, int]:
    """Anneals the sequence that is given; returns the best makespan and how many moves were made.

    It makes none where what ends last waits for needs alone, all the way back: then nothing is shorter.

    Args:
        sequence: in and out. trial: room for one more.
        now, then: working space; their `start`, `position`, `queues` and `rows` may be the same.
        best, best_sequence: the shortest so far, rewritten when a shorter one is found.
    """
    cause, ahead, number, upto, least = now.cause, now.ahead, now.number, now.queues[1], now.queues[2]
    value = placed(p, more, sequence, now)
    num_ops, num_rows = len(sequence), len(now.cap)
    ends_last = now.last[num_rows]
    for k in range(num_ops):
        trial[k] = sequence[k]
    for move in range(cooling.num_moves):
        if cooling.stop[0] != 0 or best <= cooling.target:
            return best, move
        x, count = -1, 0
        k = ends_last
        while k >= 0:
            if cause[k] >= 0 and cause[k] == ahead[k]:
                count += 1
                if np.random.random() * count < 1.0:
                    x = k
            k = cause[k]
        if count == 0:
            return best, move
        if np.random.random() < _ANYWHERE:
            x = np.random.randint(num_ops)
        y = ahead[x]
        while y >= 0 and ahead[y] >= 0 and np.random.random() < _FURTHER:
            y = ahead[y]
        if y < 0:
            continue
        if np.random.random() < 0.5:
            changed = moved_forward(more, sequence, number, y, x, upto, trial)
        else:
            changed = moved_back(more, sequence, number, y, x, least, trial)
        if not changed:
            continue
        made = placed(p, more, trial, then)
        if made >= 0 and is_kept(made - value, cooling, move):
            value, ends_last = made, then.last[num_rows]
            for k in range(y, x + 1):
                sequence[k] = trial[k]
            for k in range(num_ops):
                cause[k], ahead[k], number[k] = then.cause[k], then.ahead[k], then.number[k]
            if value < best * (1 - 1e-12):
                best = value
                for k in range(num_ops):
                    best_sequence[k] = sequence[k]
        else:
            for k in range(y, x + 1):
                trial[k] = sequence[k]
    return best, cooling.num_moves
