"""Jackson's preemptive schedule of one machine: no order of its ops ends sooner.

For ops in any order, one by one. `longest_paths.jackson` is the compiled one, of queues whose microbatches
come in turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def preemptive_span(heads: Sequence[float], durations: Sequence[float], tails: Sequence[float]) -> float:
    """Runs, at every moment, of the ops that are there the one with the longest tail, and cuts ops at will.

    Args:
        heads, durations, tails: of each op the ms before it can start at best, that it takes, and that must follow.

    Returns the ms from 0 until the last tail is over; 0 where there are no ops.
    """
    waiting = sorted(range(len(heads)), key=lambda op: heads[op], reverse=True)
    there: list[tuple[float, int, float]] = []
    now = most = 0.0
    while waiting or there:
        if not there:
            now = max(now, heads[waiting[-1]])
        while waiting and heads[waiting[-1]] <= now:
            op = waiting.pop()
            heapq.heappush(there, (-tails[op], op, durations[op]))
        behind, op, left = heapq.heappop(there)
        until = heads[waiting[-1]] if waiting else math.inf
        if now + left > until:
            heapq.heappush(there, (behind, op, left - (until - now)))
            now = until
        else:
            now += left
            most = max(most, now - behind)
    return most
