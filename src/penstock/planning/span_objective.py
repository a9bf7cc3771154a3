"""The span as a makespan: a rank that starts h ms late may end h ms late.

The span of a rank is its last end less its first start. A rank begins with the first forward of one of the pipelines
it hosts, on the first of its stages there. Everything that forward waits for runs before the rank has started:

    one pipeline, stages on different ranks      that start is the same in every schedule
    two pipelines, one in each direction         there are two such starts, and the order chooses
    a chain that visits a rank twice on its way  others may go first there, and only a latest start is known

So the largest span is at most the makespan in which max(h) - h counts after each rank's last op, h being its earliest
first start: that problem is searched. And it is at least the makespan with the latest first starts instead: that
problem is bounded. Where first starts are fixed the two are one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.engine.network import NONE, Array
from penstock.planning.bounds import jackson_bound, span_bound, ways
from penstock.planning.problem import Problem


class FirstOp(NamedTuple):
    """A queue whose first op a rank may begin with, and when (ms); `fixed` where it starts then in every such order,
    else it starts no later."""

    queue: int
    start: float
    fixed: bool


@dataclass(frozen=True)
class Span:
    """The span of a problem's orders, in makespans that are `shift` ms longer.

    Attributes:
        searched: the problem whose makespan, less `shift`, is at least the span.
        bounded: the problem whose makespan, less `shift`, is at most the span, in every order.
        firsts: of each rank, what it may begin with.
    """

    searched: Problem
    bounded: Problem
    shift: float
    firsts: tuple[tuple[FirstOp, ...], ...]

    @property
    def fixed(self) -> bool:
        """Whether each rank's first start is the same in every order."""
        return all(len(mine) <= 1 and all(first.fixed for first in mine) for mine in self.firsts)

    def lower_bound(self) -> float:
        """ms that no order's span is below."""
        return max(span_bound(self.bounded), jackson_bound(self.bounded) - self.shift)

    def of(self, start: Array) -> float:
        """The span (ms) of starts, one of each op."""
        queues, firsts, ends = self.searched.queues, *self._ends
        begun, over = np.full(queues.num_ranks, np.inf), np.zeros(queues.num_ranks)
        np.minimum.at(begun, queues.rank[firsts], start[queues.op_first[firsts]])
        np.maximum.at(over, queues.rank[firsts], start[ends] + queues.duration[firsts])
        return float(np.max(over - begun, initial=0.0))

    @cached_property
    def _ends(self) -> tuple[Array, Array]:
        """The queues that have ops, and the last op of each."""
        queues = self.searched.queues
        there = np.flatnonzero(queues.size > 0)
        return there, queues.op_first[there + 1] - 1


def span_of(problem: Problem) -> Span:
    """Works out how early and how late each rank may start."""
    queues = problem.queues
    firsts = _firsts(problem)
    earliest, latest = np.zeros(queues.num_ranks), np.zeros(queues.num_ranks)
    way = ways(queues)
    for r, mine in enumerate(firsts):
        earliest[r] = min((way[first.queue] for first in mine), default=0.0)
        latest[r] = max((first.start for first in mine), default=0.0)
    shift = float(latest.max(initial=0.0))
    searched = replace(problem, queues=queues._replace(tail=shift - earliest))
    bounded = replace(problem, queues=queues._replace(tail=shift - latest))
    return Span(searched, bounded, shift, firsts)


def _firsts(problem: Problem) -> tuple[tuple[FirstOp, ...], ...]:
    """What each rank may begin with: the first forward of each pipeline there."""
    queues = problem.queues
    way = ways(queues)
    forward = {
        (int(queues.pipeline[q]), problem.stage[q]): q
        for q in range(len(queues.rank))
        if problem.kind[q] == "F" and queues.size[q] > 0
    }
    found: list[tuple[FirstOp, ...]] = []
    for r in range(queues.num_ranks):
        mine = []
        after = _after(problem, r)
        for pipeline, hosts in enumerate(problem.placement.pipelines):
            if r not in hosts or (pipeline, 0) not in forward:
                continue
            stage = hosts.index(r)
            chain = [forward[pipeline, s] for s in range(stage)]
            if any(_may_go_first(problem, q, after) for q in chain):
                mine.append(FirstOp(forward[pipeline, stage], _all_of(problem, after), fixed=False))
            else:
                mine.append(FirstOp(forward[pipeline, stage], way[forward[pipeline, stage]], fixed=True))
        found.append(tuple(mine))
    return tuple(found)


def _after(problem: Problem, r: int) -> Array:
    """Of each queue, whether its ops need one of rank r."""
    queues = problem.queues
    after = queues.rank == r
    for _ in range(len(after)):
        further = after.copy()
        for before in (queues.message_from, queues.local_from):
            further |= (before != NONE) & after[before]
        if (further == after).all():
            break
        after = further
    return after


def _may_go_first(problem: Problem, chained: int, after: Array) -> bool:
    """Whether an op that needs none of the rank in question may run on the rank of queue `chained` before its first.

    That of the same pipeline is the forward of an earlier stage; any other either comes after, or goes that way too.
    """
    queues = problem.queues
    return any(
        not after[q]
        and queues.size[q] > 0
        and q != chained
        and (
            queues.pipeline[q] != queues.pipeline[chained]
            or (problem.kind[q] == "F" and problem.stage[q] < problem.stage[chained])
        )
        for q in range(queues.rank_first[queues.rank[chained]], queues.rank_first[queues.rank[chained] + 1])
    )


def _all_of(problem: Problem, after: Array) -> float:
    """All ops that need none of the rank in question one after the other, each with the delay of its message onwards:
    no path through them is longer."""
    queues = problem.queues
    return float(((queues.duration + queues.delay_to) * queues.size)[~after].sum())
