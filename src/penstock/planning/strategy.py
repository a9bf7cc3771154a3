"""The steps of a search in their order, and how they share the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from penstock.engine.compiled import is_compiled
from penstock.planning import exact
from penstock.planning.annealing import Threads, annealed, is_quick
from penstock.planning.bounds import busy_bound, jackson_bound, ramp_bound, work_bound, work_seconds
from penstock.planning.building_blocks import BlockSearch
from penstock.planning.destructive_bound import DestructiveBound
from penstock.planning.problem import Problem
from penstock.planning.result import Progress
from penstock.planning.search import PerturbationSearch, Search, Span, Trials, Walk, span_of
from penstock.planning.starts import greedy, named

JUSTIFIED_SHARE, _REPEATED_SHARE, _WALKED_SHARE = 0.1, 0.3, 0.35
"""Shares of the time left that a step takes; the last is for problems that are left to CP-SAT then."""

_WALKED_SHARE_IF_SEVERAL = 0.15
"""The same where ranks host several stages."""

_AGAIN_SHARE_IF_SEVERAL = 0.5
"""The share of the time left in which the best order is justified again and again, where ranks host several stages.
Where they host one, local search finds as much in that time."""

_BOUND_SHARE = 0.1
"""The most of the time left that the bound which counts a rank's own work may take."""

_REFUTED_SHARE = 0.1
"""The share of the time left that the bound by refutation takes at most."""

_UNCOMPILED_SPEED = 1e-3
"""How fast bounds are that are not compiled, beside compiled ones."""

_MOST_JUSTIFIED = 5.0
"""Seconds after which justification finds little more."""


def begin(
    problem: Problem,
    goal: str,
    seed: int,
    stop_at_gap: float,
    on_progress: Callable[[Progress], None] | None,
    began: float,
    until: float = math.inf,
) -> Search:
    """A search for the objective, with its bound and a first order."""
    span: Span | None = None
    if goal == "span":
        span = span_of(problem)
        problem, bound = span.searched, span.lower_bound() + span.shift
    elif is_quick(problem.queues.num_ops):
        bound = jackson_bound(problem)
    else:
        bound = busy_bound(problem)
    search = Search(problem, bound, seed, stop_at_gap, on_progress, began, until, span=span)
    greedy(search)
    return search


def run(search: Search) -> bool:
    """Searches on from the first order until the gap is closed or the time of the search is over.

    Returns whether the search came to that end: an interrupt from the keyboard ends it too, and the best order found
    till then stands.
    """
    with suppress(KeyboardInterrupt):
        search.report(search.how)
        spared = _BOUND_SHARE * search.left * (1.0 if is_compiled() else _UNCOMPILED_SPEED)
        if not search.closed and work_seconds(search.bounded) < spared:
            known = work_bound(search.bounded)
            search.improve_bound(known)
            if not search.closed:
                search.improve_bound(ramp_bound(search.bounded, known))
        if not search.closed and search.left > 0:
            named(search)
        _refute(search, _REFUTED_SHARE * search.left)
        if not search.closed and search.problem.hosts_several:
            until = search.seconds + _REPEATED_SHARE * search.left
            annealed(search, BlockSearch, until, "building block", again=False)
        annealed(search, Trials, search.seconds + min(JUSTIFIED_SHARE * search.left, _MOST_JUSTIFIED), "justified")
        several, num_ops = search.problem.hosts_several, search.problem.queues.num_ops
        if several:
            until = search.seconds + _AGAIN_SHARE_IF_SEVERAL * search.left
            annealed(search, PerturbationSearch, until, "justified", again=False)
        if num_ops <= (exact.MOST_OPS_IF_SEVERAL if several else exact.MOST_OPS) and exact.available():
            share = _WALKED_SHARE_IF_SEVERAL if several else _WALKED_SHARE
            annealed(search, Walk, search.seconds + share * search.left)
            exact.lessen(search, search.until)
        annealed(search, Walk, search.until)
        annealed(search, Trials, search.until, "justified")
        return True
    return False


def _refute(search: Search, seconds: float) -> None:
    """Raises the bound by refuting times between it and the best order so far."""
    if search.closed or seconds <= 0:
        return
    bound = DestructiveBound(search.bounded, search.lower_bound, search.value, search.stop_at_gap)
    with Threads(1) as threads:
        threads.run([partial(bound.go, threads.stop)], seconds)
    search.improve_bound(bound.bound)
