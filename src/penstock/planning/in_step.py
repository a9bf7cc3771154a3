"""Orders that need no list scheduling, and no machine code: microbatches begin at even intervals.

    rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 ...      each op stands where it would start if a forward and a backward
    rank 1 | .  F0 F1 .  I0 W0 F2 I1 W1 F3 ...      took an even step on every stage and nothing else were in its way

All ranks go by the same moments, which only grow along whatever waits, so nobody can lock up. The longer the
interval, the fewer microbatches are under way at once: the least one is taken with which every rank keeps to its cap,
and at the longest each microbatch is alone. Some columns are sorted a few times, so this takes a second where list
scheduling without machine code takes many. Where ranks host several stages large problems come out shorter so, too:
list scheduling by class lets the ranks fall out of step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from penstock.engine.network import Array
from penstock.planning.bounds import topological, ways
from penstock.planning.problem import Problem, fits

SHARES = (0.75, 0.5, 0.6, 0.4)
"""Steps that are tried, as shares of the work of a microbatch on a stage: with a half, a rank with one stage has its
forwards and its backwards half an interval apart, as in 1F1B. Which is best depends on placement and delays."""

_HALVINGS = 8
"""How often the interval is halved in (by its logarithm): then it is within some percent of the least."""


def in_step(problem: Problem) -> Iterator[Array]:
    """Orders (queue ids, rank after rank): for each step the one with about the least interval within the caps.

    Where even one microbatch alone is above a cap, they are those of one microbatch alone.
    """
    queues = problem.queues
    if queues.num_ops == 0:
        yield np.empty(0, np.int64)
        return
    place = np.empty(len(queues.rank), np.int64)
    place[topological(queues)] = np.arange(len(queues.rank))
    queue = np.repeat(np.arange(len(queues.rank)), queues.size)
    number = np.arange(queues.num_ops) - queues.op_first[queue]
    by_place = np.lexsort((place[queue], queues.rank[queue]))
    queue, number = queue[by_place], number[by_place]
    pipeline = np.array(problem.microbatch_pipeline, np.int64)
    microbatch = np.empty(queues.num_ops, np.int64)
    for p in range(problem.placement.num_pipelines):
        mine = queues.pipeline[queue] == p
        microbatch[mine] = np.flatnonzero(pipeline == p)[number[mine]]
    work = float(np.bincount(queues.rank, queues.duration * queues.size).max()) / max(1, len(pipeline))
    is_weight = np.array([kind == "W" for kind in problem.kind])
    rows = [slice(*ends) for ends in zip(queues.row_first[:-1], queues.row_first[1:], strict=True)]

    def at(interval: float, way: Array) -> Array:
        moment = microbatch * interval + way[queue]
        # Stable, so that of two ops at one moment the one stands first that the other may wait for.
        return np.concatenate([queue[row][np.argsort(moment[row], kind="stable")] for row in rows])

    for share in SHARES:
        step = share * work * queues.num_ranks / problem.placement.num_stages
        stepping = queues._replace(duration=np.where(is_weight, queues.duration, step))
        way = np.array(ways(stepping))
        longest = float((way + stepping.duration).max()) + 1.0
        least = max(work, 1e-6 * longest)
        best = at(least, way)
        if not fits(problem, best):
            best = at(longest, way)
            for _ in range(_HALVINGS):
                middle = math.sqrt(least * longest)
                row = at(middle, way)
                if fits(problem, row):
                    best, longest = row, middle
                else:
                    least = middle
        yield best
