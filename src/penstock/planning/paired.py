"""Plans in which a rank may run a forward and a backward of another microbatch as one (`schedule.pairs`).

The bound is that of a problem without pairs whose forwards and backwards are shorter:

    costs     0F 10 ms, 0B 20 ms, as a pair 24 ms    relaxed   0F 8 ms, 0B 16 ms
    a schedule with the pair    |====== 0F3+0B1 ======|        24 ms
    the same without            |== 0F3 =|=== 0B1 ====|        8 + 16 ms: no later, so all that follows is in time

Each stage's F and B are scaled by the least share that a pair on one of its ranks takes of its two ops. So no pair is
shorter than its two relaxed ops, and no op is longer than it was. Whatever schedule with pairs there is, the same
order without pairs is a schedule of the relaxed problem, with the same memory and a makespan that is no larger. A
lower bound of the relaxed problem therefore holds for every schedule with pairs.

Another bound knows that a rank has no backward to pair with before the first can be there, and no forward after its
last one. Before H ms it runs forwards alone, in its last E ms backwards alone, and between them at most 1 / share
times as much work as alone:

    |idle| F F F F F |   pairs, or ops alone   | B B B B |        work <= H - idle + (M - H - E) / share + E
    0               H                        M - E        M

Orders come from the library's schedules of the placement, `dualpipe-v` with its own pairs among them, and from plans
of three problems: the relaxed one, in which every op counts as if it were in a pair; the one without an overlap; and
that with whole backwards alone, as a half can't be in a pair. In each, pairs are joined as by `passes.overlap_pairs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from math import inf

from penstock.cost import Costs, Links
from penstock.engine.tolerance import is_within, slack
from penstock.library import build
from penstock.passes import separate_pairs
from penstock.passes.overlap import joinable_pairs, weigh_pairs
from penstock.planning.options import PlanRequest, limits_of
from penstock.planning.result import Plan, certain
from penstock.planning.starts import MOST_OPS, built
from penstock.schedule import Op, Placement, Schedule, ScheduleError, check
from penstock.schedule.op import BACKWARD, FORWARD, WEIGHT
from penstock.simulation import simulate

Start = tuple[str, Schedule]
"""What made an order, and the order."""

_MOST_AT_ONCE = 2_000
"""Ops up to which pairs are joined in an order so quickly that it is done for the first one without a look at the
clock."""

_OF_PLANS = 0.7
"""Of the time, the share for orders; the rest joins pairs in them."""

PAIRED = "paired"
"""What a plan with pairs says behind what found its order."""


def relaxed_costs(costs: Costs, placement: Placement) -> Costs:
    """The costs without the overlap, with forwards and backwards so short that two of them are no longer than their
    pair."""
    least = [1.0] * costs.num_stages
    for rank in {rank for hosts in placement.pipelines for rank in hosts}:
        stages = placement.stages_of(rank)
        shares = [_share(costs, forward, backward) for forward in stages for backward in stages]
        for stage in stages:
            least[stage] = min(least[stage], *shares)
    f, b = (tuple(ms * share for ms, share in zip(row, least, strict=True)) for row in (costs.f, costs.b))
    return replace(costs, f=f, b=b, overlap=None)


def _share(costs: Costs, forward: int, backward: int) -> float:
    """What a pair takes of the time that its ops take one after the other; 1 where it is no shorter."""
    alone = costs.f[forward] + costs.b[backward]
    pair = costs.pair_duration(Op(FORWARD, forward, 1), Op(BACKWARD, backward, 0))
    return min(1.0, pair / alone) if alone > 0 else 1.0


def busy_bound(
    costs: Costs, num_ranks: int, num_microbatches: int, placement: Placement, split: bool | None
) -> float:
    """A lower bound of the makespan by what each rank has to do; 0 with several pipelines."""
    if placement.num_pipelines > 1:
        return 0.0
    stages = range(costs.num_stages)
    there = [placement.stages_of(placement.pipelines[0][stage]) for stage in stages]
    pair = {(f, b): costs.pair_duration(Op(FORWARD, f, 1), Op(BACKWARD, b, 0)) for f in stages for b in there[f]}
    back = [b if split is False else min(b, i + w) for b, i, w in zip(costs.b, costs.i, costs.w, strict=True)]
    first = costs.b if split is False else list(map(min, costs.b, costs.i))  # until the gradient can leave
    forward = [min(costs.f[s], *(pair[s, other] for other in there[s])) for s in stages]
    backward = [min(first[s], *(pair[other, s] for other in there[s])) for s in stages]
    best = 0.0
    for rank in range(num_ranks):
        here = placement.stages_of(rank)
        if not here:
            continue
        idle = min(sum(forward[:s]) for s in here)
        ahead = min(sum(forward) + sum(backward[s + 1 :]) for s in here)
        behind = min(sum(forward[s + 1 :]) + sum(backward) for s in here)
        work = num_microbatches * sum(costs.f[s] + back[s] for s in here)
        share = min(_share(costs, f, b) for f in here for b in here)
        rest = work - (ahead - idle) - behind
        if rest >= 0:  # else the two ends meet, and the rank may have no pairs at all
            best = max(best, ahead + behind + share * rest)
    return best


def plan_pairs(
    request: PlanRequest, planned: Callable[[PlanRequest], Plan], clock: Callable[[], float] = time.perf_counter
) -> Plan:
    """The best schedule found with pairs or without, and a bound for both.

    Whatever the limit, the relaxed problem is planned, which gives the bound, and its order and the first one of the
    library are tried; all else ends when time is over.

    Args:
        planned: plans requests whose costs have no overlap.
        clock: what says the time, in seconds.
    """
    began, limit = clock(), request.time_limit
    costs, links, placement, split = request.costs, request.links, request.placement, request.split
    assert placement is not None

    plans: list[Plan] = []

    def is_over() -> bool:
        return clock() - began >= limit or any(each.interrupted for each in plans)

    def order(each: Costs, form: bool | None, seconds: float) -> Plan:
        plans.append(planned(replace(request, costs=each, split=form, time_limit=seconds, progress=None)))
        return plans[-1]

    alone, relaxed = replace(costs, overlap=None), relaxed_costs(costs, placement)
    forms = [] if relaxed == alone else [None, False] if split is None else [split]
    bound = order(relaxed, split, _OF_PLANS * limit / (1 + len(forms)))
    is_small = 2 * placement.num_stages * request.num_microbatches <= _MOST_AT_ONCE

    def tried() -> Iterator[Start]:
        orders = [(bound.how, bound.schedule)]
        yield orders[0]
        library = _library(request, bound.schedule)
        for start in islice(library, 1):
            yield from _joined(start, costs, links, (lambda: False) if is_small else is_over, first=True)
        for number, form in enumerate(forms):
            left = _OF_PLANS * limit - (clock() - began)
            if left <= 0 or is_over():
                break
            found = order(alone, form, left / (len(forms) - number))
            orders.append((found.how, found.schedule))
            yield orders[-1]
        for start in chain(library, orders) if split is not True else ():
            if is_over():
                return
            yield from _joined(start, costs, links, is_over)

    best: Plan | None = None
    for how, schedule in tried():
        ran = simulate(schedule, costs, links)
        if best is None or ran.makespan < best.makespan - slack(best.makespan):
            best = replace(
                bound,
                schedule=replace(schedule, name="plan"),
                makespan=ran.makespan,
                value=ran.makespan,
                how=f"{how}, {PAIRED}" if schedule.pairs else how,
                timeline=ran,
            )
    assert best is not None
    check(best.schedule)
    lower = max(bound.lower_bound, busy_bound(costs, request.num_ranks, request.num_microbatches, placement, split))
    lower = certain(lower, best.value)
    certificate = replace(bound.certificate, pairs="none" if split is True else "any")
    return replace(best, lower_bound=lower, certificate=certificate, seconds=clock() - began)


def _joined(
    start: Start, costs: Costs, links: Links, is_over: Callable[[], bool], first: bool = False
) -> Iterator[Start]:
    """The order as it is, with all pairs that can be, and with those that gain; as long as there is time.

    Args:
        first: whether the order itself comes without a look at the clock.
    """
    how, schedule = start
    if is_over() and not first:
        return
    yield start
    if is_over():
        return
    pairs = joinable_pairs(schedule, is_over)
    if pairs and not is_over():
        alone = separate_pairs(schedule)
        yield how, replace(alone, pairs=pairs)
        yield how, weigh_pairs(alone, pairs, costs, links, is_over)


def _library(request: PlanRequest, like: Schedule) -> Iterator[Start]:
    """The library's schedules that keep the limits, of the forms of backwards asked for; the one that comes with
    pairs first. Halves can't be in a pair.

    Args:
        like: has the placement, and the deal of microbatches to pipelines where one is given.
    """
    is_any_deal = request.deal in ("any", "in turn")
    costs, num_ranks, number = request.costs, request.num_ranks, request.num_microbatches
    if request.split is True or 2 * like.num_stages * number > MOST_OPS:
        return
    own: list[Start] = []
    with suppress(ScheduleError):
        own.append(("dualpipe-v", build("dualpipe-v", num_ranks, number, overlap=True)))
    limits = limits_of(costs, None, num_ranks, request.max_in_flight, request.memory_limit, True)
    counted = limits.counted(costs)
    for name, schedule in chain(own, built(like.placement, num_ranks, number)):
        whole = all(op.kind != WEIGHT for row in schedule.order for op in row)
        is_dealt_so = is_any_deal or schedule.microbatch_pipeline == like.microbatch_pipeline
        if schedule.placement != like.placement or not is_dealt_so or not (whole or request.split is None):
            continue
        if min(limits.cap) == inf or all(map(is_within, simulate(schedule, counted).peak_activations, limits.cap)):
            yield name, schedule
