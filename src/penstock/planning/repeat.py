"""Search over building blocks: one microbatch's pattern, repeated every period and squeezed.

A building block says when each op of microbatch 0 would run; microbatch j follows j periods later:

    offset of   F0 F1 I1 I0        op j of a queue: offset + j * period
    rank 0      0  .  .  6
    rank 1      .  1  3  .

These moments are wishes. List scheduling takes them as values, least first, and with the true times, delays and caps
moves every op to the front as far as they let it (the "squeeze" of Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory"): filling, draining and microbatches that differ in nothing but their number need no rules of
their own. Simulated annealing then changes a few numbers of the block at a time, and with them the whole schedule.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import FloatRows, Floats, Ints
from penstock.engine.list_by_values import ListSpace, list_ops
from penstock.engine.network import Network
from penstock.planning.metropolis import Cooling, is_kept
from penstock.planning.metropolis import seed as seed


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


def drawn(p: Network, b: BlockArrays, best: float, best_row: Ints, space: ListSpace, cooling: Cooling) -> float:
    """Draws blocks whose steps are alike: stretched by one factor each way, forward and backward.

    Args:
        b: its block is in and out, of the best drawn here.
        best, best_row: the shortest makespan so far, and its row, which is rewritten when a shorter one is found.
        space: `ListSpace`.
        cooling: its temperatures do not count.
    """
    num_ranks, num_queues = len(p.cap), len(p.rank)
    hops, step, scale, block, trial = b.hops, b.step, b.scale, b.block, b.trial
    for _ in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return best
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
        made = squeezed(p, trial, space)
        if made < 0:
            continue
        trial[0] = made
        if made < block[0]:
            block[:] = trial
        if made < best * (1 - 1e-12):
            best = made
            best_row[:] = space.row
            if best <= cooling.target:
                return best
    return best


def improved(p: Network, b: BlockArrays, best: float, best_row: Ints, space: ListSpace, cooling: Cooling) -> float:
    """Anneals the block that is given; returns the best makespan. The arguments are those of `drawn`."""
    num_ranks, num_queues = len(p.cap), len(p.rank)
    first = 3 + num_ranks
    hops, chain, scale, block, trial = b.hops, b.chain, b.scale, b.block, b.trial
    for move in range(cooling.num_moves):
        if cooling.stop[0] != 0:
            return best
        trial[:] = block
        size = scale * 10.0 ** np.random.uniform(-1.0, 0.7)
        change = size * (1.0 if np.random.random() < 0.5 else -1.0)
        kind, chosen = np.random.random(), np.random.randint(num_queues)
        if kind < 0.35:  # one queue
            trial[first + chosen] += change
        elif kind < 0.6:  # all of its pipeline from there on
            for q in range(num_queues):
                if p.pipeline[q] == p.pipeline[chosen] and chain[q] >= chain[chosen]:
                    trial[first + q] += change
        elif kind < 0.75:  # a way as a whole
            k = np.random.randint(hops.shape[1])
            largest = 1e-12
            for q in range(num_queues):
                largest = max(largest, hops[q, k])
            for q in range(num_queues):
                trial[first + q] += 3.0 * change * hops[q, k] / largest
        elif kind < 0.85:
            trial[1] *= math.exp(np.random.uniform(-0.1, 0.1))
        elif kind < 0.92:  # how long one rank waits for a better op
            r = np.random.randint(num_ranks)
            trial[3 + r] = max(0.0, trial[3 + r] + 0.5 * change)
        else:
            more = 0.2 * change
            for r in range(num_ranks):
                trial[3 + r] = max(0.0, trial[3 + r] + more)
        made = squeezed(p, trial, space)
        if made < 0:
            continue
        trial[0] = made
        if is_kept(made - block[0], cooling, move):
            block[:] = trial
        if made < best * (1 - 1e-12):
            best = made
            best_row[:] = space.row
            if best <= cooling.target:
                return best
    return best
