"""A problem op by op: the one set of arrays that CP-SAT, and bounds of ops in any order, take."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.network import Array, OpGraph
from penstock.engine.sweep import Timer


@dataclass(frozen=True)
class OpArrays:
    """Ops on rows, and what each of them needs.

    Attributes:
        duration: ms of each op.
        head, tail: ms that pass before each op can start, and after it has ended, at least.
        rows: the ops of each row. An op may stand in several rows at once.
        source, to, delay: of each need, the op that must have ended, the op that waits, and ms in between.
        takes, gives: memory that each op takes on its rows at its start, and gives back at its end.
        cap: the most that each row may hold.
        taker: of each op that gives memory back, the op that took it, where every op gives back what one took.
    """

    duration: Array
    head: Array
    tail: Array
    rows: Sequence[Array]
    source: Array
    to: Array
    delay: Array
    takes: Array
    gives: Array
    cap: Sequence[float]
    taker: Array | None = None

    def jackson_bound(self) -> float:
        """No order of these ops ends sooner (ms): the longest path, or for some row Jackson's preemptive schedule."""
        through = self.head + self.duration + self.tail
        each = (
            preemptive_span(*(of[row].tolist() for of in (self.head, self.duration, self.tail))) for row in self.rows
        )
        return max(float(through.max(initial=0.0)), *each)


def paths(duration: Array, source: Array, to: Array, delay: Array) -> tuple[Array, Array]:
    """The longest path to the start of each op, and from its end, over what each needs (ms)."""
    ops = np.arange(len(duration))
    # Every op stands in a row of its own, so it waits for what it needs alone.
    graph = OpGraph(np.arange(len(ops) + 1), ops, source, to, delay)
    head = Timer(*graph.network(duration)).time(ops).start
    tail = Timer(*graph.turned().network(duration[::-1])).time(ops).start
    return np.asarray(head), np.asarray(tail)[::-1]


def preemptive_span(heads: Sequence[float], durations: Sequence[float], tails: Sequence[float]) -> float:
    """Jackson's preemptive schedule of one row: of the ops that are there, that with the longest tail runs at every
    moment, and ops are cut at will.

    For ops in any order, one by one. `longest_paths.jackson` is the compiled one, of queues whose microbatches come
    in turn.

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
