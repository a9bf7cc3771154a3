"""How many microbatches each pipeline has: all ways to deal them, and the time shared among their searches.

Microbatches are alike, so a deal is a count per pipeline. A quick bound of every deal (the way to each rank, and
its work) comes first; the likeliest are posed and bounded as problems of their own, and searched one after the other
while they may hold a better schedule than the best so far. What no search has refuted counts: the bound of all deals
is the least of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from penstock.cost import Costs, Links
from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.planning.family import in_turn
from penstock.schedule import Placement

MOST_LISTED = 20_000
"""DealSearches that are gone through one by one at most; of more, only those that are near to dealing in turn."""

_MOST_POSED = 33
"""DealSearches that are made problems of their own at most."""

_FIRST_SHARE, _OTHERS_SHARE = 0.4, 0.2
"""Shares of the time that microbatches dealt in turn are searched for first, and then the other deals together."""

Deal = tuple[int, ...]


class DealSearch(Protocol):
    """A search for one deal: the best value so far (ms), and what is proved."""

    value: float
    lower_bound: float

    @property
    def closed(self) -> bool: ...

    @property
    def seconds(self) -> float: ...


S = TypeVar("S", bound=DealSearch)


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
    """Every deal, once."""
    if num_pipelines == 1:
        yield (num_microbatches,)
        return
    for first in range(num_microbatches + 1):
        for rest in all_deals(num_microbatches - first, num_pipelines - 1):
            yield (first, *rest)


def num_deals(num_microbatches: int, num_pipelines: int) -> int:
    return math.comb(num_microbatches + num_pipelines - 1, num_pipelines - 1)


@dataclass
class DealSearches(Generic[S]):
    """The deals of a problem.

    Attributes:
        listed: those that may be searched, the likeliest first; microbatches dealt in turn are among them.
        rest: ms that no schedule of any other deal ends before.
        quick: of each deal listed, ms that no schedule of it ends before.
        searches: what was found for each so far.
    """

    listed: list[Deal]
    rest: float
    quick: dict[Deal, float] = field(default_factory=dict)
    searches: dict[Deal, S] = field(default_factory=dict)

    def run(self, first: S, begin: Callable[[Deal], S], run: Callable[[S, float], None], time_limit: float) -> S:
        """Searches the deals until the bound of all is met or `time_limit` (seconds since the first began) is over.

        Returns the search with the best schedule, its bound that of all deals.

        Args:
            first: the search of the first deal, begun.
        """
        plain, *others = self.listed
        best = self.searches[plain] = first
        if not others:
            run(best, time_limit)
        else:
            run(best, _FIRST_SHARE * time_limit)
            until = (_FIRST_SHARE + _OTHERS_SHARE) * time_limit
            likely: list[Deal] = []
            for number, deal in enumerate(others):
                if first.seconds > until:  # what is not begun is bounded by the least of the quick bounds
                    self.rest = min(self.rest, *(self.quick[other] for other in others[number:]))
                    break
                self.searches[deal] = begin(deal)
                likely.append(deal)
            likely.sort(key=lambda deal: self.searches[deal].lower_bound)
            for number, deal in enumerate(likely):
                found = self.searches[deal]
                if found.lower_bound < best.value * (1 - EPSILON):
                    share = max(0.0, until - found.seconds) / (len(likely) - number)
                    run(found, found.seconds + share)
                    if found.value < best.value * (1 - EPSILON):
                        best = found
            run(best, time_limit)
        best.lower_bound = min(self.rest, *(found.lower_bound for found in self.searches.values()))
        return best


def deals_of(
    costs: Costs, placement: Placement, num_ranks: int, num_microbatches: int, links: Links
) -> DealSearches[S]:
    """All deals: the most likely to search, and a bound of the others."""
    num_pipelines = placement.num_pipelines
    plain = in_turn(num_microbatches, num_pipelines)
    if num_deals(num_microbatches, num_pipelines) > MOST_LISTED:
        # Every pipeline has all stages, so whatever the deal, the ranks share the same work.
        work = sum(_work(costs, s) for s in range(placement.num_stages))
        return DealSearches([plain], num_microbatches * work / num_ranks)
    deals = np.array(list(all_deals(num_microbatches, num_pipelines)), np.int64)
    bounds = quick_bound(deals, costs, placement, num_ranks, links)
    far = np.abs(deals - np.array(plain)).sum(axis=1)
    order = np.lexsort((far, bounds))
    likely = [tuple(deals[k].tolist()) for k in order[:_MOST_POSED]]
    rest = float(bounds[order[_MOST_POSED:]].min(initial=math.inf))
    others = [deal for deal in likely if deal != plain]
    return DealSearches(
        [plain, *others], rest, {tuple(deals[k].tolist()): float(bounds[k]) for k in order[:_MOST_POSED]}
    )
