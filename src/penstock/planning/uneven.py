"""Plans over microbatches that differ: a schedule for the mean microbatch, and the best order of the real ones in it.

A cap on memory counts what each microbatch holds. The mean microbatch says too little of it where long ones come
together, so schedules are sought under heavier and heavier ones, up to the heaviest, until an order is found that
keeps the cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.cost import Costs, Links, Uneven
from penstock.dispatch import Dispatch
from penstock.engine.network import OpGraph
from penstock.engine.timing import Timer
from penstock.planning.jackson import preemptive_span
from penstock.planning.microbatch_order import DISPATCHES, OrderCandidate, OrderSearch
from penstock.schedule import Schedule, ScheduleError

HEAVIER = 3
"""How many sizes of a microbatch are tried, from the mean to the heaviest, before the heaviest."""
MOVES_SHARE = 0.2
"""Of the time, for moves of microbatches."""


def mean_costs(costs: Costs, num_microbatches: int, weight: float = 0.0) -> Costs:
    """What the mean microbatch costs.

    Args:
        weight: from 0 to 1, how far the activation is from the mean to that of the heaviest microbatch, by stage.
    """

    def mean(kind: str, row: Sequence[float]) -> list[float]:
        factors = costs.time_factors(kind, num_microbatches).mean(axis=1)
        return [ms * float(factor) for ms, factor in zip(row, factors, strict=True)]

    sizes = costs.activation_factors("F", num_microbatches)
    kept = sizes.mean(axis=1) * (1 - weight) + sizes.max(axis=1) * weight
    return replace(
        costs,
        f=mean("F", costs.f),
        i=mean("I", costs.i),
        w=mean("W", costs.w),
        b=mean("B", costs.b),
        activation=[held * float(factor) for held, factor in zip(costs.activation, kept, strict=True)],
        uneven=(),
    )


def best_uneven(
    costs: Costs,
    num_microbatches: int,
    links: Links,
    memory_limit: float | Sequence[float] | None,
    max_in_flight: float | Sequence[float] | None,
    dispatch: Dispatch,
    time_limit: float,
    seed: int,
    make: Callable[[Costs, float], tuple[Schedule, str]],
) -> tuple[OrderCandidate, OrderSearch, str]:
    """The best order found of the schedules made for the mean microbatch, or for heavier ones.

    Args:
        dispatch: how it will be run; frozen rows may be those of any dispatch, as it ran.
        make: makes a schedule for even costs in so many seconds, and says how.

    Raises:
        ScheduleError: not even with all microbatches as heavy as the heaviest is there one.
    """
    began = time.perf_counter()
    counted, cap = costs, memory_limit
    if max_in_flight is not None:  # then each activation counts as one, from its forward's start to W's end
        of_time = Uneven(time=costs.factors.time, message=costs.factors.message)
        counted = replace(costs, activation=[1.0] * costs.num_stages, freed_by_input=0.0, uneven=of_time)
        cap = max_in_flight
    dispatches = DISPATCHES if dispatch is Dispatch.FROZEN else (dispatch,)
    weights = [0.0] if memory_limit is None else np.linspace(0, 1, HEAVIER + 1).tolist()
    best: tuple[OrderCandidate, OrderSearch, str] | None = None
    left = time_limit * (1 - MOVES_SHARE)
    for place, weight in enumerate(weights):
        try:
            schedule, how = make(
                mean_costs(costs, num_microbatches, weight), max(left / (len(weights) - place), 0.01)
            )
        except ScheduleError:  # too heavy by now
            if best is None:
                raise
            break
        left = time_limit * (1 - MOVES_SHARE) - (time.perf_counter() - began)
        search = OrderSearch(
            schedule, counted, links, memory_limit=float("inf") if cap is None else cap, dispatches=dispatches
        )
        try:
            found = search.best_by_rules()
        except ScheduleError:
            if weight == weights[-1] and best is None:
                raise
            continue
        if best is None or found.makespan < best[0].makespan:
            best = found, search, how
        if weight > 0 or weight == weights[-1] or left <= 0:
            break
    assert best is not None
    candidate, search, how = best
    candidate = search.moved(candidate, began + time_limit, seed)
    return candidate, search, f"{how}, {candidate.rule} order"


def uneven_bound(candidate: OrderCandidate, links: Links) -> float:
    """No order of these ops ends sooner, however microbatches are ordered (ms).

    For each rank Jackson's preemptive schedule of its ops, each between the earliest moment its own microbatch can be
    there and the least that must follow it.

    Args:
        candidate: the ops in any order; it says which need which, and how long each takes.
    """
    order = candidate.lowered
    ranks = range(order.num_ranks)
    rank, to, ops = order.ints["rank_of"], order.ints["edge_to"], np.arange(order.num_ops)
    source = np.repeat(ops, np.diff(order.ints["edge_first"]))
    delays = np.array([[0.0 if a == b else links.delay(a, b) for b in ranks] for a in ranks])
    # Every op in a row of its own: it waits for what it needs alone.
    graph = OpGraph(np.arange(order.num_ops + 1), ops, source, to, delays[rank[source], rank[to]])
    duration = order.duration
    head = list(Timer(*graph.network(duration)).time(ops).start)
    tail = list(Timer(*graph.turned().network(duration[::-1])).time(ops).start)[::-1]
    first, duration = order.ints["first"].tolist(), duration.tolist()
    rows = [slice(first[r], first[r + 1]) for r in ranks]
    return max((preemptive_span(head[row], duration[row], tail[row]) for row in rows), default=0.0)
