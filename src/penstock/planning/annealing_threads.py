"""Walks of local search: several threads anneal from the best order so far and bring back what they find."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from penstock.engine.compiled import is_compiled, ready
from penstock.engine.network import Array
from penstock.planning import anneal
from penstock.planning.problem import Problem
from penstock.planning.search import Search, time_of
from penstock.planning.threads import Threads

HOT, COLD = 0.6, 0.12
"""Temperatures at which a walk begins and ends, as shares of the mean duration of an op."""

_SLICE = 0.1
"""Seconds after which walks meet, and say where they stand."""

_BEGINNING = 5e-6
"""Seconds that taking up an order takes for each op, at most: where that leaves no time to walk there is no walk."""


class Walk:
    """One thread's walk: its order, and the compiled functions' arrays."""

    def __init__(self, problem: Problem, seed: int) -> None:
        queues = problem.queues
        n = queues.num_ops
        self.problem = problem
        self._module: Any = ready(anneal)
        self._queue = np.empty(n, np.int64)
        self._needs, self._after = np.empty((n, 2), np.int64), np.empty((n, 2), np.int64)
        self._module.lay_out(queues, self._queue, self._needs, self._after)
        self._ints, self._floats = np.empty((7, n), np.int64), np.empty((3, n))
        self._flags, self._last = np.zeros((2, n), np.bool_), np.empty(queues.num_ranks, np.int64)
        self._random = np.random.default_rng(seed)
        self.best_row = np.empty(n, np.int64)
        self.now = self.best = float("inf")
        self.scale = float(np.mean(queues.duration)) if len(queues.duration) else 0.0
        # At first few: it soon grows to what they are.
        self.moves_a_second = min(50_000.0, 2e7 / max(1, n)) if is_compiled(anneal) else min(500.0, 2e5 / max(1, n))
        self.stuck = False

    def begin(self, row: Array) -> None:
        """Takes up an order."""
        queues = self.problem.queues
        self.now = self.best = time_of(self.problem, row, self._floats[0])
        self.best_row[:] = row
        head = np.empty(len(queues.rank), np.int64)
        self._module.load(queues, row, head, self._ints[0], self._ints[1], self._floats[1], self._last)
        rank_order = np.empty(queues.num_ops, np.int64)
        self._module.line_up(queues, row, head, self._needs, rank_order)
        self._ints[2] = np.lexsort((rank_order, self._floats[0]))
        self._ints[3, self._ints[2]] = np.arange(queues.num_ops)

    def go(self, seconds: float, hot: float, cold: float, target: float, stop: Array) -> None:
        """Walks for about so long while the temperature falls from `hot` to `cold` (shares of an op), or until `stop`
        is no longer 0."""
        num_moves = max(1, int(seconds * self.moves_a_second))
        self._module.seed(int(self._random.integers(2**31)))
        before = time.perf_counter()
        self.now, self.best, moved = self._module.anneal(
            self.problem.queues, self._queue, self._needs, self._after, self._ints, self._floats, self._flags,
            self._last, num_moves, hot * self.scale, cold * self.scale, target, self.now, self.best, self.best_row,
            stop,
        )  # fmt: skip
        spent = time.perf_counter() - before
        self.stuck = moved == 0 and stop[0] == 0
        if moved == num_moves or stop[0] != 0:
            self.moves_a_second = min(4 * self.moves_a_second, (moved + 1) / max(spent, 1e-6))


def walked(search: Search, until: float, num_threads: int | None = None) -> None:
    """Step 3: local search until `until` (seconds since the search began), from the best order so far.

    Ends before where no pair on the critical path can change places.
    """
    num_ops = search.problem.queues.num_ops
    if num_ops == 0:
        return
    with Threads(num_threads, is_compiled(anneal)) as threads:
        if search.closed or search.seconds + _BEGINNING * num_ops * threads.num >= until:
            return
        walks = [Walk(search.problem, search.seed + k) for k in range(threads.num)]
        while not search.closed and search.seconds < until:
            begins, left = search.seconds, until - search.seconds
            length = left if left < 1.5 else max(1.0, 0.4 * left)
            for walk in walks:
                walk.begin(search.row)
            while not search.closed and search.seconds < until and (done := (search.seconds - begins) / length) < 1:
                part = min(_SLICE / length, 1 - done)
                hot = HOT * (COLD / HOT) ** done
                cold = HOT * (COLD / HOT) ** (done + part)
                calls = [partial(walk.go, part * length, hot, cold, search.target, threads.stop) for walk in walks]
                threads.run(calls, until - search.seconds)
                for walk in walks:
                    search.take(walk.best, walk.best_row, "local search")
                search.report("local search")
                if all(walk.stuck for walk in walks):
                    return
