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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from penstock.cost import CostError, Costs, Links
from penstock.engine.tolerance import slack
from penstock.library import build
from penstock.passes import separate_pairs
from penstock.passes.overlap import joinable_pairs, weigh_pairs
from penstock.planning.library_starts import MOST_OPS, built
from penstock.planning.progress import certain
from penstock.planning.result import Plan
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
    planned: Callable[..., Plan],
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    links: Links,
    placement: Placement,
    *,
    split: bool | None,
    max_in_flight: float | Sequence[float] | None,
    memory_limit: float | Sequence[float] | None,
    time_limit: float,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Plan:
    """The best schedule found with pairs or without, and a bound for both.

    Whatever the limit, the relaxed problem is planned, which gives the bound, and its order and the first one of the
    library are tried; all else ends when time is over.

    Args:
        planned: `ps.plan`, for costs without an overlap.
        clock: what says the time, in seconds.
    """
    began = clock()

    def is_over() -> bool:
        return clock() - began >= time_limit

    alone, relaxed = replace(costs, overlap=None), relaxed_costs(costs, placement)
    problems = [(alone, split), (alone, False)] if split is None else [(alone, split)]
    problems = problems if relaxed != alone else []
    limits = {"max_in_flight": max_in_flight, "memory_limit": memory_limit}

    def order(each: Costs, form: bool | None, seconds: float) -> Plan:
        return planned(
            each, num_ranks, num_microbatches, links, placement=placement, split=form, time_limit=seconds,
            **limits, **options,
        )  # fmt: skip

    bound = order(relaxed, split, _OF_PLANS * time_limit / (1 + len(problems)))

    def tried() -> Iterator[Start]:
        orders = [(bound.how, bound.schedule)]
        yield orders[0]
        library: Iterator[Start] = iter(())
        if split is not True:
            library = _library(costs, placement, num_ranks, num_microbatches, split, limits)
            is_small = 2 * placement.num_stages * num_microbatches <= _MOST_AT_ONCE
            for how, schedule in islice(library, 1):
                yield how, schedule
                over = (lambda: False) if is_small else is_over
                yield from ((how, joined) for joined in _joined(schedule, costs, links, over))
        for number, (each, form) in enumerate(problems):
            left = _OF_PLANS * time_limit - (clock() - began)
            if left <= 0:
                break
            found = order(each, form, left / (len(problems) - number))
            orders.append((found.how, found.schedule))
            yield orders[-1]
        for how, schedule in chain(_until(is_over, library), orders) if split is not True else ():
            yield from ((how, joined) for joined in _joined(schedule, costs, links, is_over))

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
    lower = max(bound.lower_bound, busy_bound(costs, num_ranks, num_microbatches, placement, split))
    lower = certain(lower, best.value, lambda: f"costs {costs!r} over {placement!r}")
    certificate = replace(bound.certificate, pairs="none" if split is True else "any")
    return replace(best, lower_bound=lower, certificate=certificate, seconds=clock() - began)


def _until(is_over: Callable[[], bool], starts: Iterator[Start]) -> Iterator[Start]:
    """Those that are there in time; each is made when it is asked for."""
    while not is_over():
        if (start := next(starts, None)) is None:
            return
        yield start


def _joined(schedule: Schedule, costs: Costs, links: Links, is_over: Callable[[], bool]) -> Iterator[Schedule]:
    """The schedule as it is, with those pairs that gain, and with all that can be; as long as there is time."""
    if is_over():
        return
    yield schedule
    pairs = joinable_pairs(schedule, is_over)
    if pairs and not is_over():
        alone = separate_pairs(schedule)
        yield replace(alone, pairs=pairs)
        yield weigh_pairs(alone, pairs, costs, links, is_over)


def _library(
    costs: Costs,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    split: bool | None,
    limits: dict[str, Any],
) -> Iterator[Start]:
    """The library's schedules of the placement that keep within the limits, of the forms of backwards asked for."""
    if 2 * placement.num_stages * num_microbatches > MOST_OPS:
        return
    for name, schedule in _with_own_pairs(placement, num_ranks, num_microbatches):
        whole = all(op.kind != WEIGHT for row in schedule.order for op in row)
        if (whole or split is not False) and _fits(schedule, costs, num_ranks, limits):
            yield name, schedule


def _with_own_pairs(placement: Placement, num_ranks: int, num_microbatches: int) -> Iterator[Start]:
    """All schedules of a placement, the one that comes with pairs first."""
    with suppress(ScheduleError):
        paired = build("dualpipe-v", num_ranks, num_microbatches, overlap=True)
        if paired.placement == placement:
            yield "dualpipe-v", paired
    yield from built(placement, num_ranks, num_microbatches)


def _fits(schedule: Schedule, costs: Costs, num_ranks: int, limits: dict[str, Any]) -> bool:
    counted = replace(costs, activation=[1.0] * costs.num_stages, freed_by_input=0.0)
    for limit, unit in ((limits["max_in_flight"], counted), (limits["memory_limit"], costs)):
        if limit is not None:
            most = [float(limit)] * num_ranks if not isinstance(limit, Sequence) else list(limit)
            held = simulate(schedule, unit).peak_activations
            if any(h > m + slack(m) for h, m in zip(held, most, strict=True)):
                return False
    return True


def require_plannable(goal: object, is_dynamic: bool, general: bool, offload: bool, is_uneven: bool) -> None:
    """Raises CostError for what is not planned with pairs."""
    why = {
        "another objective than the makespan": goal != "makespan",
        "a dispatch that is not frozen": is_dynamic,
        "stages that branch or are shared": general,
        "offloads": offload,
        "uneven microbatches": is_uneven,
    }
    if what := next((each for each, is_so in why.items() if is_so), None):
        raise CostError(
            f"the costs have an overlap, and pairs are not planned with {what}: they could be quicker than the lower "
            "bound; plan for dataclasses.replace(costs, overlap=None), and then join pairs with "
            "ps.passes.overlap_pairs(plan.schedule, costs)"
        )
