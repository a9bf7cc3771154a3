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
from penstock.engine.tolerance import slack
from penstock.planning import exact
from penstock.planning.bounds import OpArrays, paths
from penstock.planning.exact import OrderModel, TimeGrid
from penstock.planning.microbatch_order import DISPATCHES, OrderCandidate, OrderSearch
from penstock.planning.options import PlanRequest
from penstock.planning.result import Certificate, Plan, certain, gap
from penstock.schedule import ScheduleError, check
from penstock.simulation import simulate

HEAVIER = 3
"""How many sizes of a microbatch are tried, from the mean to the heaviest, before the heaviest."""
MOVES_SHARE = 0.2
"""Of the time, for moves of microbatches."""
EXACT_SHARE = 0.15
"""Of the time, kept for CP-SAT to prove what was found, where it can."""
EXACT_OPS = 200
"""Ops up to which it is asked."""


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


def plan_uneven(request: PlanRequest, planned: Callable[[PlanRequest], Plan]) -> Plan:
    """A plan for the mean microbatch, or a heavier one, and the best order of the real ones in it.

    Args:
        planned: plans requests whose microbatches are alike.

    Raises:
        ScheduleError: not even with all microbatches as heavy as the heaviest is there a plan.
    """
    began, time_limit = time.perf_counter(), request.time_limit
    costs, links, placement, split = request.costs, request.links, request.placement, request.split is not False
    assert placement is not None
    num_ops = request.num_microbatches * costs.num_stages * (3 if split else 2)
    asks = exact.available() and num_ops <= EXACT_OPS
    candidate, search, how, interrupted = _best(request, planned, time_limit * (1 - EXACT_SHARE * asks))
    schedule = search.schedule(candidate) if request.mode.is_dynamic else search.executed(candidate)
    check(schedule)
    # By the costs in which the caps are given: it is refused if the order is above them.
    timeline = simulate(schedule, search.costs, links=links, dispatch=request.mode, memory_limit=search.caps)
    if request.mode.is_dynamic:
        timeline = replace(timeline, peak_activations=simulate(timeline.executed(), costs, links).peak_activations)
    else:
        timeline = simulate(schedule, costs, links=links)
    value = timeline.makespan
    if value > candidate.makespan + slack(value):
        raise ScheduleError(
            f"the plan says {candidate.makespan!r} ms, its simulation {value!r} ms (rule: confirmed)",
            rule="confirmed",
        )
    bound = uneven_bound(candidate, links)
    left = time_limit - (time.perf_counter() - began) - exact.STOPPING
    if asks and not interrupted and left > 0 and gap(value, bound) > request.stop_at_gap:
        bound = max(bound, exact_uneven_bound(candidate, links, search.caps, value, left, request.seed))
    bound = certain(bound, value)
    certificate = Certificate(placement, "split" if split else "whole", order="any")
    return Plan(
        schedule, value, value, bound, certificate, time.perf_counter() - began, how, timeline,
        tuple(candidate.order.tolist()), interrupted,
    )  # fmt: skip


def _best(
    request: PlanRequest, planned: Callable[[PlanRequest], Plan], time_limit: float
) -> tuple[OrderCandidate, OrderSearch, str, bool]:
    """The best order found of the schedules made for the mean microbatch, or for heavier ones; frozen rows may be
    those of any dispatch, as it ran."""
    began = time.perf_counter()
    costs, cap = request.costs, request.memory_limit
    if request.max_in_flight is not None:  # then each activation counts as one, from its forward's start to W's end
        of_time = Uneven(time=costs.factors.time, message=costs.factors.message)
        costs = replace(costs, activation=[1.0] * costs.num_stages, freed_by_input=0.0, uneven=of_time)
        cap = request.max_in_flight
    asked = replace(
        request, dispatch=Dispatch.FROZEN, split=request.split is not False, recompute=False, offload=None,
        deal="in turn",
    )  # fmt: skip
    weights = [0.0] if request.memory_limit is None else np.linspace(0, 1, HEAVIER + 1).tolist()
    best: tuple[OrderCandidate, OrderSearch, str] | None = None
    left = time_limit * (1 - MOVES_SHARE)
    for place, weight in enumerate(weights):
        even = mean_costs(request.costs, request.num_microbatches, weight)
        seconds = max(left / (len(weights) - place), 0.01)
        try:
            found = planned(replace(asked, costs=even, time_limit=seconds))
        except ScheduleError:  # too heavy by now
            if best is None:
                raise
            break
        time_limit *= not found.interrupted
        left = time_limit * (1 - MOVES_SHARE) - (time.perf_counter() - began)
        search = OrderSearch(
            found.schedule, costs, request.links, memory_limit=float("inf") if cap is None else cap,
            dispatches=DISPATCHES if request.mode is Dispatch.FROZEN else (request.mode,),
        )  # fmt: skip
        try:
            candidate = search.best_by_rules()
        except ScheduleError:
            if weight == weights[-1] and best is None:
                raise
            continue
        if best is None or candidate.makespan < best[0].makespan:
            best = candidate, search, found.how
        if weight > 0 or weight == weights[-1] or left <= 0:
            break
    assert best is not None
    candidate, search, how = best
    candidate = search.moved(candidate, began + time_limit, request.seed)
    return candidate, search, f"{how}, {candidate.rule} order", not time_limit


def _op_arrays(candidate: OrderCandidate, links: Links, caps: Sequence[float]) -> OpArrays:
    order = candidate.lowered
    ranks = range(order.num_ranks)
    arrays, source = order.graph.arrays, order.graph.sources
    rank, to, first = arrays.rank, arrays.edge_to, arrays.first
    delay = np.array([[0.0 if a == b else links.delay(a, b) for b in ranks] for a in ranks])[rank[source], rank[to]]
    head, tail = paths(order.duration, source, to, delay)
    rows = np.split(np.arange(order.num_ops), first[1:-1])
    takes, gives = np.maximum(order.change, 0.0), np.maximum(-order.change, 0.0)
    return OpArrays(order.duration, head, tail, rows, source, to, delay, takes, gives, caps)


def uneven_bound(candidate: OrderCandidate, links: Links) -> float:
    """No order of these ops ends sooner, however microbatches are ordered (ms).

    For each rank Jackson's preemptive schedule of its ops, each between the earliest moment its own microbatch can be
    there and the least that must follow it.

    Args:
        candidate: the ops in any order; it says which need which, and how long each takes.
    """
    return _op_arrays(candidate, links, ()).jackson_bound()


def exact_uneven_bound(
    candidate: OrderCandidate, links: Links, caps: Sequence[float], value: float, seconds: float, seed: int
) -> float:
    """The same by CP-SAT, which counts memory too; 0 where nothing is proved in so many seconds.

    It is asked for a makespan below `value`, of ops in any order that keep to the caps.
    """
    began = time.perf_counter()
    ops = _op_arrays(candidate, links, caps)
    grid = TimeGrid.of((float(ms) for ms in (*ops.duration, *ops.delay)), value)
    model = OrderModel(replace(grid, steps=grid.steps - grid.exact))
    model.minimize(model.add_ops(ops))
    return model.solve(seconds - (time.perf_counter() - began), seed).bound
