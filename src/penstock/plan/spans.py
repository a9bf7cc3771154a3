"""The span as a makespan: a rank that starts h ms late may end h ms late.

The span of a rank is its last end less its first start. Where a rank begins with the first microbatch's forward of
the first stage it hosts, and so do the ranks before it, that start is the same in every schedule, h. So the largest
span is a makespan in which max(h) - h counts after each rank's last op. In other placements h is the earliest start
there is, and the result, no less than the span, is what the search makes small.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.plan.bounds import heads_and_tails, jackson_bound, span_bound
from penstock.plan.problem import Problem


def with_tails(problem: Problem) -> tuple[Problem, float]:
    """The problem whose makespan, less the second value, is the span."""
    queues = problem.queues
    head, _ = heads_and_tails(problem)
    earliest = np.zeros(queues.num_ranks)
    for r in range(queues.num_ranks):
        mine = [q for q in range(queues.rank_first[r], queues.rank_first[r + 1]) if queues.size[q] > 0]
        earliest[r] = min((float(head[queues.op_first[q]]) for q in mine), default=0.0)
    shift = float(earliest.max(initial=0.0))
    return replace(problem, queues=queues._replace(tail=shift - earliest)), shift


def bound_of_span(problem: Problem, tailed: Problem, shift: float) -> float:
    """A lower bound of the span: that of the makespan with tails where first starts are fixed, else rank by rank."""
    bound = span_bound(problem)
    if _fixed_starts(problem):
        bound = max(bound, jackson_bound(tailed) - shift)
    return bound


def _fixed_starts(problem: Problem) -> bool:
    """Whether every rank's first op, and all that it waits for, are the first ops of their ranks."""
    if problem.placement.num_pipelines != 1:
        return False
    hosts = problem.placement.pipelines[0]
    ranks = set(hosts)
    return len(set(hosts[: len(ranks)])) == len(ranks)
