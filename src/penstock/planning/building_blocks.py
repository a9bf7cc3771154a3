"""Building blocks as starts: what a microbatch does, repeated and squeezed (see `repeat`), on several threads.

Greedy rules look at what is ready now. Where a rank hosts several stages and memory is short, what counts is when
each stage's activation is freed again, which the steps of the block decide: ZB-V, V-Half and V-Min are three choices
of the steps down and up a V; here the costs at hand choose.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.list_by_values import ListSpace
from penstock.engine.network import NONE, Array
from penstock.planning import repeat
from penstock.planning.annealing import Annealer
from penstock.planning.metropolis import Cooling
from penstock.planning.problem import BACKWARD_CLASS, FORWARD_CLASS, Problem
from penstock.planning.repeat import BlockArrays
from penstock.planning.search import Search, time_of

_DRAWN_SHARE = 0.15
"""Of the time, for drawing blocks to begin with."""

_UP, _DOWN, _BACK_DOWN, _BACK_UP, _SAME, _LATE, _NUM_STEPS = range(7)
"""Columns of `steps_before`: ways to higher and lower ranks, forward and backward; on one rank; and of W."""


def steps_before(problem: Problem) -> tuple[Array, Array]:
    """Per queue, ms of the steps on a microbatch's way before it, by direction; and its place on that way."""
    queues = problem.queues
    classes = problem.priority_class
    hops = np.zeros((len(queues.rank), _NUM_STEPS))
    chain = np.zeros(len(queues.rank), np.int64)
    first = [q for q in range(len(chain)) if queues.message_from[q] == NONE and queues.local_from[q] == NONE]
    for q in first:
        place = 0
        while q != NONE:
            chain[q] = place
            place += 1
            late = int(queues.local_to[q])
            if classes[q] == BACKWARD_CLASS and late != NONE:
                hops[late], chain[late] = hops[q], place
                hops[late, _SAME] += queues.duration[q]
                hops[late, _LATE] = 1.0
            after = int(queues.message_to[q])
            if after == NONE and classes[q] == FORWARD_CLASS:
                after = late
            if after != NONE:
                higher = int(np.sign(queues.rank[after] - queues.rank[q]))
                way = (_BACK_UP, _SAME, _BACK_DOWN) if classes[q] == BACKWARD_CLASS else (_DOWN, _SAME, _UP)
                hops[after] = hops[q]
                hops[after, way[higher + 1]] += queues.duration[q] + queues.delay_to[q] * (higher != 0)
            q = after
    return hops, chain


def hosts_several(problem: Problem) -> bool:
    """Whether a rank hosts several stages, of one pipeline or of several."""
    takers = problem.queues.rank[problem.queues.memory > 0]
    return len(takers) > len(np.unique(takers))


class BlockSearch(Annealer[Search]):
    """One thread's block, and the compiled functions' arrays. Temperatures are shares of the makespan."""

    MODULE, MOVES, HOT, COLD = repeat, (1000.0, 1e6), 0.005, 0.0002

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed)
        queues = problem.queues
        self._problem, self._queues, self._space = problem, queues, ListSpace.of(queues)
        hops, chain = steps_before(problem)
        self.block = np.full(3 + queues.num_ranks + len(queues.rank), np.inf)
        work = np.bincount(queues.rank, queues.duration * queues.size, queues.num_ranks)
        self._arrays = BlockArrays(
            hops, chain, float(work.max()) / int(queues.size.max()), float(np.mean(queues.duration)), self.block,
            np.empty_like(self.block), np.empty(_NUM_STEPS),
        )  # fmt: skip
        self.best, self.row = np.inf, np.empty(queues.num_ops, np.int64)

    @property
    def unit(self) -> float:
        return float(self.block[0])

    def adopt(self, row: Array) -> None:
        """Takes up the block that an order comes nearest to repeating, if it is the best so far."""
        queues, first = self._queues, 3 + self._queues.num_ranks
        start = np.empty(queues.num_ops)
        time_of(self._problem, row, start)
        each = [start[queues.op_first[q] : queues.op_first[q + 1]] for q in range(len(queues.rank))]
        paces = [float(np.median(np.diff(times))) for times in each if len(times) > 1]
        for in_turn in (1.0, 0.0):
            trial = self._arrays.trial
            trial[1] = max(float(np.median(paces)), 1e-6) if paces else self._arrays.period
            trial[2], trial[3:first] = in_turn, 0.0
            for q, times in enumerate(each):
                trial[first + q] = float(np.median(times - trial[1] * np.arange(len(times)))) if len(times) else 0.0
            space = self._space
            made = self._module.squeezed(queues, trial, space)
            if 0 <= made < self.block[0]:
                trial[0] = made
                self.block[:] = trial
                if made < self.best:
                    self.best, self.row[:] = float(made), space.row

    def begin(self, search: Search, until: float) -> None:
        """Takes up the best of the blocks that good orders come nearest to repeating."""
        for row in search.good_rows():
            if search.seconds < until:
                self.adopt(row)

    def move(self, cooling: Cooling, done: float) -> int | None:
        """Draws blocks to begin with; then changes the best of them."""
        draws = done < _DRAWN_SHARE or not np.isfinite(self.block[0])
        search = self._module.drawn if draws else self._module.improved
        self.best = search(self._queues, self._arrays, self.best, self.row, self._space, cooling)
        return cooling.num_moves if cooling.stop[0] == 0 else None

    def bring(self, search: Search) -> None:
        if np.isfinite(self.best):
            search.take(self.best, self.row, "building block")
