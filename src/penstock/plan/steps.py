"""The steps of a search in their order, and how they share the time."""

from __future__ import annotations

from penstock.plan import exact
from penstock.plan.search import Search, Space, greedy, justified
from penstock.plan.walk import walked

JUSTIFIED_SHARE, WALKED_SHARE = 0.1, 0.4
"""Shares of the time; what is left is for exact solving where the problem is small enough, else for local search."""

_MOST_JUSTIFIED = 5.0
"""Seconds after which justification finds little more."""


def run(search: Search, time_limit: float) -> None:
    """Searches until the gap is closed or `time_limit` (seconds since the search began) is over.

    An interrupt from the keyboard ends it, and what was found till then stands.
    """
    space = Space(search.problem)
    greedy(search, space)
    try:
        if not search.closed:
            justified(search, space, min(JUSTIFIED_SHARE * time_limit, _MOST_JUSTIFIED))
        small = search.problem.queues.num_ops <= exact.MOST_OPS and exact.available()
        walked(search, WALKED_SHARE * time_limit if small else time_limit)
        if small:
            exact.solve(search, time_limit)
            walked(search, time_limit)
    except KeyboardInterrupt:
        search.report("interrupted")
