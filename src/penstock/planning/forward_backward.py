"""Forward-backward improvement: all ops are moved as late as possible, then as early as possible, and so on.

    listed      |F0 F1 F2 .  .  I0 W0 .  I1 ...          ops in order of class
    turned      list scheduling with time turned round, in the order in which the ops ended: gaps move to the front
    turned back list scheduling in the order in which the ops start there: gaps move to the end, and it is shorter

(Double justification, Valls, Ballestin and Quintanilla 2005.) Each half costs one list scheduling. With waits
(see `list_by_values`) and from many starts this finds what greedy rules cannot.

From a good order the search goes on in the same way (`shaken`): its ends are shaken a little, and what comes out is
kept as in simulated annealing. Many ops then move a little at once, where local search moves one pair far. Where a
rank hosts several stages, forwards must mostly keep their turn on the way back: the one that is ready first would
take the memory that another was to have, and the ranks fall out of step.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.arrays import Floats, IntRows, Ints, Stop
from penstock.engine.list_by_values import ListSpace, list_ops
from penstock.engine.network import Network
from penstock.planning.metropolis import Cooling, is_kept
from penstock.planning.metropolis import seed as seed

MOST_ROUNDS, PATIENCE = 10, 3
"""Rounds of one start at most, and those without a better schedule after which it is given up."""

IN_TURN = 0.7
"""How often what takes memory keeps its turn where an order is shaken."""


def ends_reversed(p: Network, start: Floats, noise: float, values: Floats) -> None:
    """The values that let ops run in the reverse order of their ends, give or take `noise` ms."""
    for q in range(len(p.rank)):
        for op in range(p.op_first[q], p.op_first[q + 1]):
            values[op] = -(start[op] + p.duration[q])
    if noise > 0.0:
        for op in range(len(values)):
            values[op] += np.random.uniform(-noise, noise)


def justify(
    p: Network, back: Network, noise: float, best: float, best_row: Ints, space: ListSpace, stop: Stop
) -> float:
    """Turns a schedule round and back some times; returns the best makespan seen.

    Args:
        p, back: the queues, and the same with time turned round.
        best, best_row: the shortest makespan so far, and its row, which is rewritten when a shorter one is found.
        space: `ListSpace`; its starts are those of the schedule to begin with.
        stop: its one number is 0 until some other thread wants this one to come to its end.
    """
    idle, found = 0, 1e300
    for _ in range(MOST_ROUNDS):
        ends_reversed(p, space.start, noise, space.values)
        if stop[0] != 0 or list_ops(back, space, True, False) < 0:
            return best
        ends_reversed(p, space.start, noise, space.values)
        if stop[0] != 0:
            return best
        makespan = list_ops(p, space, False, False)
        if makespan < 0:
            return best
        idle = 0 if makespan < found * (1 - 1e-12) else idle + 1
        found = min(found, makespan)
        if makespan < best * (1 - 1e-12):
            best = makespan
            best_row[:] = space.row
        if idle >= PATIENCE:
            return best
    return best


def trials(
    p: Network,
    back: Network,
    classes: IntRows,
    scale: float,
    best: float,
    best_row: Ints,
    space: ListSpace,
    cooling: Cooling,
) -> float:
    """Justifies from many random starts; returns the best makespan, and stops at the target.

    After every list scheduling it looks whether it is to stop.

    Args:
        classes: several rows of priority classes, one entry per queue, to start from.
        scale: ms, what waits and noise are drawn in proportion to.
        cooling: its temperatures do not count. The others are those of `justify`.
    """
    wait, values = space.wait, space.values
    largest = 0
    for q in range(len(p.rank)):
        largest = max(largest, p.size[q])
    for _ in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return best
        chosen = np.random.randint(len(classes))
        base = scale * np.random.uniform(0.0, 1.2)
        uneven = np.random.uniform(0.0, 0.6)
        for r in range(len(wait)):
            wait[r] = base * (1.0 + np.random.uniform(-uneven, uneven))
        for q in range(len(p.rank)):
            for j in range(p.size[q]):
                values[p.op_first[q] + j] = classes[chosen, q] * (largest + 1.0) + j
        if list_ops(p, space, False, False) < 0:
            continue
        noise = 0.0 if np.random.random() < 0.5 else scale * np.random.uniform(0.0, 0.5)
        best = justify(p, back, noise, best, best_row, space, cooling.stop)
        if best <= cooling.target:
            return best
    return best


def shaken(
    p: Network,
    back: Network,
    scale: float,
    now: float,
    kept: Floats,
    best: float,
    best_row: Ints,
    space: ListSpace,
    cooling: Cooling,
) -> tuple[float, float, int]:
    """Shakes a schedule, turns it round and back, and keeps what comes out or what there was, again and again.

    After every list scheduling it looks whether it is to stop, and it does at the target.

    Args:
        scale: ms, what waits and noise are drawn in proportion to.
        now, kept: the makespan of the schedule to begin with and its starts, which are rewritten.
        best, best_row, space: see `justify`.

    Returns:
        The makespan of the schedule that was kept last, the best, and how many moves were made.
    """
    for move in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return now, best, move
        wait = scale * np.random.uniform(0.0, 1.2) if np.random.random() < 0.5 else 0.0
        for r in range(len(space.wait)):
            space.wait[r] = wait
        ends_reversed(p, kept, scale * 10.0 ** np.random.uniform(-1.5, 0.5), space.values)
        if list_ops(back, space, True, False) < 0:
            continue
        ends_reversed(p, space.start, 0.0, space.values)
        if cooling.stop[0] != 0:
            return now, best, move
        makespan = list_ops(p, space, False, np.random.random() < IN_TURN)
        if makespan < 0:
            continue
        if is_kept(makespan - now, cooling, move):
            now = makespan
            kept[:] = space.start
        if makespan < best * (1 - 1e-12):
            best = makespan
            best_row[:] = space.row
            if best <= cooling.target:
                return now, best, move + 1
    return now, best, cooling.num_moves
