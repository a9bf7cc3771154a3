"""The steps of a search in their order, and how they share the time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress

from penstock.cost import Costs, Links
from penstock.engine.tolerance import EPSILON
from penstock.planning import exact
from penstock.planning.annealing_threads import walked
from penstock.planning.bounds import jackson_bound, work_bound, work_is_cheap
from penstock.planning.building_blocks import hosts_several, repeated
from penstock.planning.expected import Samples, robust, under
from penstock.planning.library_starts import named
from penstock.planning.objective import Expected
from penstock.planning.problem import Problem, pose
from penstock.planning.progress import Progress
from penstock.planning.search import Search, Space, greedy, justified
from penstock.planning.span_objective import Span, span_of
from penstock.schedule import one_to_one

JUSTIFIED_SHARE, _REPEATED_SHARE, _WALKED_SHARE = 0.1, 0.3, 0.35
"""Shares of the time that a step takes; the last is for problems that are left to CP-SAT then."""

_MOST_JUSTIFIED = 5.0
"""Seconds after which justification finds little more."""


@functools.cache
def compile_all() -> None:
    """Compiles, or loads what was compiled before, by planning next to nothing."""
    costs = Costs.uniform(2)
    problem = pose(costs, one_to_one(2), 2, 3, Links({(0, 1): 0.5}), [(1.0, 0.5)] * 2, [2.0] * 2, split=True)
    search = Search(problem, jackson_bound(problem) / 2)
    space = Space(problem)
    work_bound(problem)
    greedy(search, space)
    justified(search, space, search.seconds + EPSILON)
    walked(search, search.seconds + 1e-3)
    repeated(search, search.seconds + 1e-3)


def begin(
    problem: Problem,
    goal: str | Expected,
    seed: int,
    stop_at_gap: float,
    on_progress: Callable[[Progress], None] | None,
    began: float,
) -> Search:
    """A search for the objective, with its bound."""
    span: Span | None = None
    if goal == "span":
        span = span_of(problem)
        problem, bound = span.searched, span.lower_bound() + span.shift
    elif isinstance(goal, Expected):
        bound = _samples(problem, goal).lower_bound()
    else:
        bound = jackson_bound(problem)
    return Search(problem, bound, seed, stop_at_gap, span, on_progress, began)


def run(search: Search, time_limit: float, goal: str | Expected = "makespan") -> None:
    """Searches until the gap is closed or `time_limit` (seconds since the search began) is over.

    An interrupt from the keyboard ends it, and what was found till then stands.
    """
    if isinstance(goal, Expected):
        _run_expected(search, time_limit, goal)
        return
    space = Space(search.problem)
    greedy(search, space)
    with suppress(KeyboardInterrupt):
        if not search.closed and work_is_cheap(search.problem):
            search.improve_bound(work_bound(search.bounded))
        if not search.closed and hosts_several(search.problem):
            named(search)
        if not search.closed and hosts_several(search.problem):
            repeated(search, search.seconds + _REPEATED_SHARE * (time_limit - search.seconds))
        if not search.closed:
            justified(search, space, search.seconds + min(JUSTIFIED_SHARE * time_limit, _MOST_JUSTIFIED))
        if search.problem.queues.num_ops <= exact.MOST_OPS and exact.available():
            walked(search, search.seconds + _WALKED_SHARE * (time_limit - search.seconds))
            exact.solve(search, time_limit)
        walked(search, time_limit)
        justified(search, space, time_limit)


def _samples(problem: Problem, goal: Expected) -> Samples:
    return Samples(tuple(under(problem, links) for links in goal.samples))


def _run_expected(search: Search, time_limit: float, goal: Expected) -> None:
    """Plans for the given delays and for some of the samples, then for all of them together."""
    samples = _samples(search.problem, goal)
    step = max(1, len(samples.problems) // 4)
    problems = [search.problem, *samples.problems[::step]]
    candidates = []
    for number, problem in enumerate(problems):
        bound = jackson_bound(problem)
        inner = Search(problem, bound, search.seed + number, search.stop_at_gap, began=search.began)
        space = Space(problem)
        greedy(inner, space)
        with suppress(KeyboardInterrupt):
            until = time_limit * 0.5 * (number + 1) / len(problems)
            justified(inner, space, search.seconds + 0.3 * max(0.0, until - search.seconds))
            walked(inner, until)
        candidates += inner.good_rows()
    with suppress(KeyboardInterrupt):
        robust(search, samples, candidates, time_limit)
