"""A lower bound by refutation: no order is over by a time for which the windows of some op close (`time_windows`).

The time is found by bisection, between a bound that is known and the makespan of some order (a destructive bound:
Klein and Scholl 1999). What a rank can do alone is exact here, with its cap and both its ends. What is lost is that
one order of a rank makes an op early and another makes it late: other ranks may assume both.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.network import Array, Network
from penstock.engine.tolerance import EPSILON, slack
from penstock.planning import time_windows
from penstock.planning.bounds import heads_and_tails, own_tails
from penstock.planning.problem import Problem
from penstock.planning.time_windows import OpWindows, RankStates

_MOST_STATES, _MOST_STATES_UNCOMPILED = 1_000_000, 2_000
"""States of a rank above which nothing is refuted."""
_NUM_SWEEPS = 60
"""How often a time is tried on all ranks."""
_TOLERANCE = 1e-5
"""Share of the makespan by which a window must change for other ranks to look at it again."""
_CLOSE = 1e-6
"""Share of the makespan to which the time is found at least."""


def states_of(network: Network, most: int, stop: Array) -> RankStates | None:
    """The states of all ranks; None where one has more than `most`, or `stop` was set."""
    num_ranks = network.num_ranks
    width = int(np.diff(network.rank_first).max(initial=0))
    tables: dict[bytes, tuple[int, int]] = {}
    counts: list[Array] = []
    following: list[Array] = []
    total = 0
    spans = np.zeros((num_ranks, 2), np.int64)
    for r in range(num_ranks):
        mine = slice(int(network.rank_first[r]), int(network.rank_first[r + 1]))
        before = np.stack([network.message_from[mine], network.local_from[mine]]) - mine.start
        before[(before < 0) | (before >= mine.stop - mine.start)] = -1
        rank = (network.size[mine], before, network.memory[mine], network.cap[r : r + 1])
        key = b"".join(array.tobytes() for array in rank)
        if key not in tables:
            made = _passed_through(*rank, most, stop)
            if made is None:
                return None
            tables[key] = total, total + len(made[0])
            total += len(made[0])
            for found, each in ((counts, made[0]), (following, made[1])):
                found.append(np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1))
        spans[r] = tables[key]
    empty = np.empty((0, width), np.int64)
    return RankStates(
        spans[:, 0].copy(), spans[:, 1].copy(), np.concatenate([empty, *counts]), np.concatenate([empty, *following])
    )


def _passed_through(
    size: Array, before: Array, memory: Array, cap: Array, most: int, stop: Array
) -> tuple[Array, Array] | None:
    """The states of one rank, in the order of how much has run, and those behind each op of theirs.

    Args:
        before: two rows, per queue one of the same rank whose op of the same number must have run, -1 for none.
    """
    num_queues, limit = len(size), cap[0] * (1 + EPSILON)
    radix = np.concatenate([[1], np.cumprod(size + 1)[:-1]]).astype(np.int64)
    layer = np.zeros((1, num_queues), np.int64)
    counts, following, reached = [], [], 0
    for _ in range(int(size.sum()) + 1):
        reached += len(layer)
        if reached > most or stop[0] != 0:
            return None
        held, codes = layer @ memory, layer @ radix
        may = layer < size
        for row in before:
            for k in np.flatnonzero(row >= 0):
                may[:, k] &= layer[:, k] < layer[:, row[k]]
        for k in np.flatnonzero(memory > 0):
            may[:, k] &= held + memory[k] <= limit
        further = codes[:, None] + radix
        found = np.unique(further[may])
        to = np.full(layer.shape, -1, np.int64)
        to[may] = reached + np.searchsorted(found, further[may])
        counts.append(layer)
        following.append(to)
        layer = found[:, None] // radix % (size + 1)
    return np.concatenate(counts), np.concatenate(following)


class DestructiveBound:
    """The search for the longest time that can be refuted.

    Args:
        known: a lower bound (ms).
        makespan: that of some order (ms), above which nothing is tried.
        closeness: how far from that a bound is as good, as a share of it.
    """

    def __init__(self, problem: Problem, known: float, makespan: float, closeness: float = 0.0) -> None:
        self._problem, self._makespan, self._closeness = problem, makespan, max(_CLOSE, closeness / 4)
        self.bound = known
        """The longest time (ms) that was refuted so far, or what was known."""

    def go(self, stop: Array) -> None:
        """Raises the bound, to the end or until the one number of `stop` is no longer 0."""
        problem, queues = self._problem, self._problem.queues
        most = _MOST_STATES if is_compiled() else _MOST_STATES_UNCOMPILED
        states = states_of(queues, most, stop)
        if states is None:
            return
        head, tail = heads_and_tails(problem, work=True)
        tail = own_tails(queues, tail)
        most = int((states.table_last - states.table_first).max(initial=0))
        room = (*np.empty((2, most)), *np.empty((2, queues.num_ops)), np.empty(queues.num_ranks, np.bool_))
        refuted, high = compiled(time_windows).refuted, self._makespan
        while high > self.bound * (1 + self._closeness) and stop[0] == 0:
            middle = (self.bound + high) / 2
            ms = _TOLERANCE * middle, slack(middle)
            if refuted(queues, states, _NUM_SWEEPS, *ms, OpWindows(head.copy(), middle - tail, *room), stop):
                self.bound = middle
            else:
                high = middle


def destructive_bound(problem: Problem, known: float, makespan: float) -> float:
    """The longest time that can be refuted (ms), or `known`; see `DestructiveBound`."""
    search = DestructiveBound(problem, known, makespan)
    search.go(np.zeros(1, np.int64))
    return search.bound
