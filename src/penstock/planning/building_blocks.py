"""Building blocks as starts: one microbatch's pattern, repeated every period and squeezed, on several threads.

A building block says when each op of microbatch 0 would run; microbatch j follows j periods later:

    offset of   F0 F1 I1 I0        op j of a queue: offset + j * period
    rank 0      0  .  .  6
    rank 1      .  1  3  .

These moments are wishes. List scheduling takes them as values, least first, and with the true times, delays and caps
moves every op to the front as far as they let it (the "squeeze" of Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory"): filling, draining and microbatches that differ in nothing but their number need no rules of
their own. Simulated annealing then changes a few numbers of the block at a time, and with them the whole schedule.

Greedy rules look at what is ready now. Where a rank hosts several stages and memory is short, what counts is when
each stage's activation is freed again, which the steps of the block decide: ZB-V, V-Half and V-Min are three choices
of the steps down and up a V; here the costs at hand choose.

`squeezed` and `walk` are written to be compiled.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import FloatRows, Floats, Ints
from penstock.engine.list_by_values import ListSpace, list_ops
from penstock.engine.network import NONE, Array, Network
from penstock.planning.annealing import Annealer
from penstock.planning.metropolis import Cooling, is_kept
from penstock.planning.metropolis import seed as seed
from penstock.planning.problem import BACKWARD_CLASS, FORWARD_CLASS, Problem
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


class BlockSearch(Annealer[Search]):
    """One thread's block, and the compiled functions' arrays. Temperatures are shares of the makespan."""

    MODULE, MOVES, HOT, COLD = sys.modules[__name__], (1000.0, 1e6), 0.005, 0.0002

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
        self.best = self._module.walk(self._queues, self._arrays, self.best, self.row, self._space, draws, cooling)
        return cooling.num_moves if cooling.stop[0] == 0 else None

    def bring(self, search: Search) -> None:
        if np.isfinite(self.best):
            search.take(self.best, self.row, "building block")


class BlockArrays(NamedTuple):
    """A building block, and what changes of it go by.

    Attributes:
        hops: per queue, ms of the steps before it: forward to higher and to lower ranks, backward to lower and to
            higher ones, on the same rank, and of waiting between I and W (1 for W).
        chain: per queue, its place on its microbatch's way down the stages and back.
        period: ms between microbatches that the work allows at best. scale: ms of an op, for waits.
        block: the makespan, the period, whether memory is taken in turn, the wait of each rank, and offsets.
        trial: room for one like it. step: room for one factor per column of `hops`.
    """

    hops: FloatRows
    chain: Ints
    period: float
    scale: float
    block: Floats
    trial: Floats
    step: Floats


def squeezed(p: Network, block: Floats, space: ListSpace) -> float:
    """The makespan of a block, repeated and squeezed; the order is left in the `ListSpace`. -1 where the ranks are
    stuck."""
    first = 3 + len(p.cap)
    space.wait[:] = block[3:first]
    for q in range(len(p.rank)):
        for j in range(p.size[q]):
            space.values[p.op_first[q] + j] = block[first + q] + block[1] * j
    return list_ops(p, space, False, block[2] > 0)


def draw(p: Network, b: BlockArrays) -> None:
    """Draws a block whose steps are alike: stretched by one factor each way, forward and backward."""
    num_ranks, num_queues = len(p.cap), len(p.rank)
    hops, step, scale, trial = b.hops, b.step, b.scale, b.trial
    alike = np.random.random() < 0.5  # the ways back as the ways there
    for k in range(4):
        step[k] = step[k - 2] if alike and k >= 2 else 1.0 + 0.5 * max(0, np.random.randint(-2, 6))
    step[4] = 1.0 if np.random.random() < 0.5 else np.random.uniform(1.0, 4.0)
    step[-1] = scale * (0.0 if np.random.random() < 0.4 else 2.0 ** np.random.uniform(-1.0, 5.0))
    trial[1] = b.period * np.random.uniform(0.6, 1.3)
    base = 0.0 if np.random.random() < 0.3 else scale * np.random.uniform(0.0, 1.5)
    trial[2] = 1.0 if np.random.random() < 0.7 else 0.0
    for r in range(num_ranks):
        trial[3 + r] = base
    for q in range(num_queues):
        offset = 0.0
        for k in range(len(step)):
            offset += step[k] * hops[q, k]
        trial[3 + num_ranks + q] = offset + trial[1] * p.pipeline[q] / (1.0 + p.pipeline.max())


def change(p: Network, b: BlockArrays) -> None:
    """Changes a few numbers of the block."""
    num_ranks, num_queues = len(p.cap), len(p.rank)
    first = 3 + num_ranks
    hops, chain, scale, trial = b.hops, b.chain, b.scale, b.trial
    trial[:] = b.block
    size = scale * 10.0 ** np.random.uniform(-1.0, 0.7)
    more = size * (1.0 if np.random.random() < 0.5 else -1.0)
    kind, chosen = np.random.random(), np.random.randint(num_queues)
    if kind < 0.35:  # one queue
        trial[first + chosen] += more
    elif kind < 0.6:  # all of its pipeline from there on
        for q in range(num_queues):
            if p.pipeline[q] == p.pipeline[chosen] and chain[q] >= chain[chosen]:
                trial[first + q] += more
    elif kind < 0.75:  # a way as a whole
        k = np.random.randint(hops.shape[1])
        largest = 1e-12
        for q in range(num_queues):
            largest = max(largest, hops[q, k])
        for q in range(num_queues):
            trial[first + q] += 3.0 * more * hops[q, k] / largest
    elif kind < 0.85:
        trial[1] *= math.exp(np.random.uniform(-0.1, 0.1))
    elif kind < 0.92:  # how long one rank waits for a better op
        r = np.random.randint(num_ranks)
        trial[3 + r] = max(0.0, trial[3 + r] + 0.5 * more)
    else:
        for r in range(num_ranks):
            trial[3 + r] = max(0.0, trial[3 + r] + 0.2 * more)


def walk(
    p: Network, b: BlockArrays, best: float, best_row: Ints, space: ListSpace, draws: bool, cooling: Cooling
) -> float:
    """Draws blocks and keeps the best, or anneals the block that is given; returns the shortest makespan.

    Args:
        b: its block is in and out, of the best drawn here, or of the last that annealing kept.
        best, best_row: the shortest makespan so far, and its row, which is rewritten when a shorter one is found.
        draws: whether blocks are drawn. The temperatures of `cooling` do not count then.
    """
    block, trial = b.block, b.trial
    for move in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return best
        if draws:
            draw(p, b)
        else:
            change(p, b)
        made = squeezed(p, trial, space)
        if made < 0:
            continue
        trial[0] = made
        if made < block[0] if draws else is_kept(made - block[0], cooling, move):
            block[:] = trial
        if made < best * (1 - 1e-12):
            best = made
            best_row[:] = space.row
            if best <= cooling.target:
                return best
    return best
