"""Local search on several threads, which anneal from the best order so far and bring back what they find."""

from __future__ import annotations

import numpy as np

from penstock.engine.compiled import is_compiled, ready
from penstock.engine.network import Array
from penstock.planning import anneal
from penstock.planning.annealing_threads import Annealer, annealed_again
from penstock.planning.problem import Problem
from penstock.planning.search import Search, time_of
from penstock.planning.threads import Threads, awaited

_BEGINNING = 5e-6
"""Seconds that taking up an order takes for each op, at most: where that leaves no time to walk there is no walk."""


class Walk(Annealer[Search]):
    """One thread's walk: its order, and the compiled functions' arrays. Temperatures are shares of the mean duration
    of an op."""

    HOT, COLD = 0.6, 0.12

    def __init__(self, problem: Problem, seed: int) -> None:
        queues = problem.queues
        n = queues.num_ops
        many = min(50_000.0, 2e7 / max(1, n)) if is_compiled(anneal) else min(500.0, 2e5 / max(1, n))
        super().__init__(ready(anneal), seed, many)
        self.problem = problem
        self._queue = np.empty(n, np.int64)
        self._needs, self._after = np.empty((n, 2), np.int64), np.empty((n, 2), np.int64)
        self._module.lay_out(queues, self._queue, self._needs, self._after)
        self._ints, self._floats = np.empty((7, n), np.int64), np.empty((3, n))
        self._flags, self._last = np.zeros((2, n), np.bool_), np.empty(queues.num_ranks, np.int64)
        self.best_row = np.empty(n, np.int64)
        self.now = self.best = float("inf")
        self.scale = float(np.mean(queues.duration)) if len(queues.duration) else 0.0

    def begin(self, search: Search, until: float) -> None:
        queues, row = self.problem.queues, search.row
        self.now = self.best = time_of(self.problem, row, self._floats[0])
        self.best_row[:] = row
        head = np.empty(len(queues.rank), np.int64)
        self._module.load(queues, row, head, self._ints[0], self._ints[1], self._floats[1], self._last)
        rank_order = np.empty(queues.num_ops, np.int64)
        self._module.line_up(queues, row, head, self._needs, rank_order)
        self._ints[2] = np.lexsort((rank_order, self._floats[0]))
        self._ints[3, self._ints[2]] = np.arange(queues.num_ops)

    def move(self, num_moves: int, done: float, hot: float, cold: float, target: float, stop: Array) -> int:
        self.now, self.best, moved = self._module.anneal(
            self.problem.queues, self._queue, self._needs, self._after, self._ints, self._floats, self._flags,
            self._last, num_moves, hot * self.scale, cold * self.scale, target, self.now, self.best, self.best_row,
            stop,
        )  # fmt: skip
        return int(moved)

    def bring(self, search: Search) -> None:
        search.take(self.best, self.best_row, "local search")


def walked(search: Search, until: float, num_threads: int | None = None) -> None:
    """Step 3: local search until `until` (seconds since the search began), from the best order so far.

    Ends before where no pair on the critical path can change places.
    """
    num_ops = search.problem.queues.num_ops
    if num_ops == 0 or not awaited(anneal, num_ops, until - search.seconds):
        return
    with Threads(num_threads, is_compiled(anneal)) as threads:
        if search.closed or search.seconds + _BEGINNING * num_ops * threads.num >= until:
            return
        walks = [Walk(search.problem, search.seed + k) for k in range(threads.num)]
        annealed_again(search, walks, threads, until)
