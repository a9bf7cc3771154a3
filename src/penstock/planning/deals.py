"""How many microbatches each pipeline gets: the likely ways to deal them are searched, and all others bounded.

Microbatches are alike, so a deal is a count for each pipeline. A quick bound of every deal (the way to each rank, and
its work) says which are likely. The likeliest are posed as problems of their own and searched one after the other,
as long as they may hold a better schedule than the best so far. The least of all bounds holds for any deal: so a
search that finds nothing better still proves more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from penstock.cost import Costs, Links
from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.planning.options import in_turn
from penstock.planning.progress import Incumbent
from penstock.schedule import Placement

MOST_LISTED = 20_000
"""Deals above which only the deal in turn is searched, and the others are bounded by their work alone."""
_MOST_POSED = 33
"""Deals that are made problems of their own at most."""
_FIRST_SHARE, _OTHERS_SHARE = 0.4, 0.2
"""Shares of the time for the deal in turn, which comes first, and then for the other deals together."""

Deal = tuple[int, ...]


S = TypeVar("S", bound=Incumbent[Any])


def quick_bound(deals: Array, costs: Costs, placement: Placement, num_ranks: int, links: Links) -> Array:
    """Of each deal, ms that no schedule ends before: for each rank, the way to it and its work."""
    work = np.zeros((num_ranks, placement.num_pipelines))
    to = np.full(num_ranks, np.inf)
    for p, hosts in enumerate(placement.pipelines):
        way = 0.0
        for s, r in enumerate(hosts):
            if s:
                way += costs.duration("F", s - 1) + links.delay(hosts[s - 1], r) * (hosts[s - 1] != r)
            to[r] = min(to[r], way)
            work[r, p] += _work(costs, s)
    taken = deals @ work.T
    return np.where(taken > 0, taken + np.where(np.isinf(to), 0.0, to), 0.0).max(axis=1, initial=0.0)


def _work(costs: Costs, stage: int) -> float:
    """ms of a microbatch on a stage at least."""
    return costs.duration("F", stage) + min(
        costs.duration("B", stage), costs.duration("I", stage) + costs.duration("W", stage)
    )


def all_deals(num_microbatches: int, num_pipelines: int) -> Iterator[Deal]:
    """Every deal, once: each share ends at one of so many bars among the microbatches."""
    end = num_microbatches + num_pipelines - 1
    for bars in combinations(range(end), num_pipelines - 1):
        yield tuple(after - before - 1 for before, after in pairwise((-1, *bars, end)))


def likely_deals(
    costs: Costs, placement: Placement, num_ranks: int, num_microbatches: int, links: Links
) -> tuple[list[tuple[Deal, float]], float]:
    """Deals beside that in turn, the likeliest first, with their quick bounds; and a bound of all that are left."""
    num_pipelines = placement.num_pipelines
    if math.comb(num_microbatches + num_pipelines - 1, num_pipelines - 1) > MOST_LISTED:
        # Every pipeline has all stages, so whatever the deal, the ranks share the same work.
        return [], num_microbatches * sum(_work(costs, s) for s in range(placement.num_stages)) / num_ranks
    plain = in_turn(num_microbatches, num_pipelines)
    deals = np.array(list(all_deals(num_microbatches, num_pipelines)), np.int64)
    bounds = quick_bound(deals, costs, placement, num_ranks, links)
    order = np.lexsort((np.abs(deals - np.array(plain)).sum(axis=1), bounds))
    likely = [(tuple(deals[k].tolist()), float(bounds[k])) for k in order[:_MOST_POSED]]
    rest = float(bounds[order[_MOST_POSED:]].min(initial=math.inf))
    return [(deal, bound) for deal, bound in likely if deal != plain], rest


def search_deals(
    first: S,
    likely: Sequence[tuple[Deal, float]],
    rest: float,
    begin: Callable[[Deal], S],
    run: Callable[[S, float], None],
    time_limit: float,
) -> S:
    """Searches until the bound of all deals is met or `time_limit` (seconds since the first began) is over.

    Returns the search with the best schedule, its bound that of all deals.

    Args:
        first: the search of the first deal, begun.
        likely, rest: the other deals, as `likely_deals` gives them.
    """
    best, others = first, list[S]()
    if likely:
        run(first, _FIRST_SHARE * time_limit)
    until = (_FIRST_SHARE + _OTHERS_SHARE) * time_limit
    for deal, bound in likely:
        if first.seconds > until:
            rest = min(rest, bound)
        else:
            others.append(begin(deal))
    others.sort(key=lambda each: each.lower_bound)
    for number, each in enumerate(others):
        if each.lower_bound < best.value * (1 - EPSILON):
            run(each, each.seconds + max(0.0, until - each.seconds) / (len(others) - number))
            if each.value < best.value * (1 - EPSILON):
                best = each
    run(best, time_limit)
    best.lower_bound = min(rest, first.lower_bound, *(each.lower_bound for each in others))
    return best
