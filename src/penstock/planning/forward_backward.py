"""Forward-backward improvement: a schedule is shaken against its end, then against its start, and so on.

    listed      |F0 F1 F2 .  .  I0 W0 .  I1 ...          ops in order of class
    turned      list scheduling with time turned round, in the order in which the ops ended: gaps move to the front
    turned back list scheduling in the order in which the ops start there: gaps move to the end, and it is shorter

(Double justification, Valls, Ballestin and Quintanilla 2005.) Each half costs one list scheduling. With waits
(see `listing`) and from many starts this finds what greedy rules cannot. Written to be compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.planning import listing, min_tree
from penstock.planning.listing import list_ops

COMPILED_WITH = (min_tree, listing)

Array = Any
PATIENCE = 3
"""Rounds without a better schedule after which a start is given up."""


def seed(number: int) -> None:
    """Seeds the random numbers of this thread's compiled functions."""
    np.random.seed(number)


def ends_reversed(p: Any, start: Array, noise: float, values: Array) -> None:
    """The values that let ops run in the reverse order of their ends, give or take `noise` ms."""
    for q in range(len(p.rank)):
        for op in range(p.op_first[q], p.op_first[q + 1]):
            values[op] = -(start[op] + p.duration[q])
    if noise > 0.0:
        for op in range(len(values)):
            values[op] += np.random.uniform(-noise, noise)


def justify(
    p: Any,
    back: Any,
    wait: Array,
    noise: float,
    rounds: int,
    start: Array,
    row: Array,
    best: float,
    best_row: Array,
    values: Array,
    state: Array,
    times: Array,
) -> float:
    """Turns a schedule round and back up to `rounds` times; returns the best makespan seen.

    Args:
        p, back: the queues, and the same with time turned round.
        start: in and out, per op.
        best, best_row: the shortest makespan so far, and its row, which is rewritten when a shorter one is found.
        row, values, state, times: working space (see `list_ops`).
    """
    idle, found = 0, 1e300
    for _ in range(rounds):
        ends_reversed(p, start, noise, values)
        if list_ops(back, values, wait, True, start, row, state, times) < 0:
            return best
        ends_reversed(p, start, noise, values)
        makespan = list_ops(p, values, wait, False, start, row, state, times)
        if makespan < 0:
            return best
        idle = 0 if makespan < found * (1 - 1e-12) else idle + 1
        found = min(found, makespan)
        if makespan < best * (1 - 1e-12):
            best = makespan
            best_row[:] = row
        if idle >= PATIENCE:
            return best
    return best


def trials(
    p: Any,
    back: Any,
    classes: Array,
    scale: float,
    num_trials: int,
    rounds: int,
    target: float,
    best: float,
    best_row: Array,
    start: Array,
    row: Array,
    wait: Array,
    values: Array,
    state: Array,
    times: Array,
) -> float:
    """Justifies from many random starts; returns the best makespan, and stops at `target`.

    Args:
        classes: several rows of priority classes, one entry a queue, to start from.
        scale: ms, what waits and noise are drawn in proportion to.
    """
    largest = 0
    for q in range(len(p.rank)):
        largest = max(largest, p.size[q])
    for _ in range(num_trials):
        chosen = np.random.randint(len(classes))
        base = scale * np.random.uniform(0.0, 1.2)
        uneven = np.random.uniform(0.0, 0.6)
        for r in range(len(wait)):
            wait[r] = base * (1.0 + np.random.uniform(-uneven, uneven))
        for q in range(len(p.rank)):
            for j in range(p.size[q]):
                values[p.op_first[q] + j] = classes[chosen, q] * (largest + 1.0) + j
        if list_ops(p, values, wait, False, start, row, state, times) < 0:
            continue
        noise = 0.0 if np.random.random() < 0.5 else scale * np.random.uniform(0.0, 0.5)
        best = justify(p, back, wait, noise, rounds, start, row, best, best_row, values, state, times)
        if best <= target:
            return best
    return best
