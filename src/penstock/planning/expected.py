"""Orders that do well on average over link delays: local search that times every order under each sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.cost import Links
from penstock.engine.network import NONE, Array
from penstock.engine.tolerance import is_within
from penstock.planning.bounds import jackson_bound
from penstock.planning.problem import Problem
from penstock.planning.search import Search, time_of

_WORSE = 2e-3
"""Share by which an order may be worse than the one before it and still be followed, at first."""


@dataclass(frozen=True)
class SampledProblems:
    """One problem under several link delays."""

    problems: tuple[Problem, ...]

    def mean(self, row: Array) -> float:
        """The mean makespan (ms) of fixed orders; infinite where they deadlock."""
        values = [time_of(problem, row) for problem in self.problems]
        return float("inf") if min(values) < 0 else float(np.mean(values))

    def lower_bound(self) -> float:
        """No schedule has a shorter mean makespan: the mean of the bounds."""
        return float(np.mean([jackson_bound(problem) for problem in self.problems]))


def under(problem: Problem, links: Links) -> Problem:
    """The problem with other link delays."""
    queues = problem.queues
    delay, delay_to = np.zeros_like(queues.delay), np.zeros_like(queues.delay_to)
    for q, before in enumerate(queues.message_from.tolist()):
        if before != NONE and queues.rank[before] != queues.rank[q]:
            delay[q] = delay_to[before] = links.delay(int(queues.rank[before]), int(queues.rank[q]))
    return Problem(
        queues.with_delays(delay, delay_to),
        problem.kind,
        problem.stage,
        problem.placement,
        problem.microbatch_pipeline,
    )


def robust(search: Search, samples: SampledProblems, candidates: list[Array], until: float) -> None:
    """Takes the best of the candidates on average, then exchanges neighbours while that helps, until `until`.

    A pair is drawn anywhere, not on one critical path: each sample has its own.
    """
    for row in candidates:
        search.take(samples.mean(row), row, "local search")
    search.report("local search")
    queues = search.problem.queues
    random = np.random.default_rng(search.seed)
    row, now = search.row.copy(), search.value
    local = queues.local_from.tolist()
    ranks = [r for r in range(queues.num_ranks) if queues.row_first[r + 1] - queues.row_first[r] > 1]
    count, reported = 0, search.seconds
    while ranks and not search.closed and search.seconds < until:
        count += 1
        r = ranks[int(random.integers(len(ranks)))]
        place = int(random.integers(queues.row_first[r], queues.row_first[r + 1] - 1))
        lead, trail = int(row[place]), int(row[place + 1])
        if lead == trail or not _may_exchange(search.problem, row, r, place, local):
            continue
        row[place], row[place + 1] = trail, lead
        value = samples.mean(row)
        cooling = _WORSE * max(0.0, 1 - search.seconds / until)
        if value <= now or (value < float("inf") and value <= now * (1 + cooling * random.random() ** 4)):
            now = value
            search.take(now, row, "local search")
        else:
            row[place], row[place + 1] = lead, trail
        if search.seconds - reported > 0.1:
            reported = search.seconds
            search.report("local search")


def _may_exchange(problem: Problem, row: Array, r: int, place: int, local: list[int]) -> bool:
    """Whether the ops at `place` and behind it keep to needs and memory when they change places."""
    queues = problem.queues
    first = int(queues.row_first[r])
    lead, trail = int(row[place]), int(row[place + 1])
    before = row[first:place]
    if local[trail] == lead and np.count_nonzero(before == lead) == np.count_nonzero(before == trail):
        return False
    taken = float(queues.memory[trail])
    return taken <= 0 or is_within(float(queues.memory[before].sum()) + taken, float(queues.cap[r]))
