"""`ps.plan`: what was asked, the road that leads to a plan, and how the plan and its bound are confirmed.

The roads, by what is asked (`planned`):

    channels        messages placed for another framework        `channel.plan_on_channel`
    total_limit     again with less room, till messages fit      `_within_total`
    overlap         a forward and a backward as one              `paired.plan_pairs`
    uneven          microbatches that differ                     `uneven.plan_uneven`
    stages, shared  stages that branch, or that ranks share      `graph.search.plan_graph`
    otherwise       a chain: each deal of microbatches searched  `_plan_chain`
      one form      all backwards split, or all whole            `strategy`
      joint         forms decided with the order                 `joint.search`

The first four change what is asked, and come back to `planned` for the rest. Whatever the road, the schedule is
checked, its value must be that of its simulation, and its bound may not be above that.

**Deals.** A deal is how many microbatches each pipeline gets; they are alike, so it is a count for each. A quick
bound of every deal (the way to each rank, and its work) says which are likely. The likeliest are posed as problems of
their own and searched one after the other, as long as they may hold a better schedule than the best so far. The least
of all bounds holds for any deal: so a search that finds nothing better still proves more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np

from penstock.cost import CostError, Costs, Links
from penstock.cost.costs import require_costs
from penstock.engine.compiled import is_compiled
from penstock.engine.tolerance import EPSILON
from penstock.planning.bounds import least_work, quick_bound
from penstock.planning.options import (
    MOST_AGAIN,
    Limits,
    PlanOptions,
    PlanRequest,
    family_of,
    in_turn,
    limits_of,
    names_options,
    per_rank,
    read_deal,
    require_plannable,
    require_weights,
)
from penstock.planning.result import Certificate, Plan, certain, confirmed, measured
from penstock.program import placements
from penstock.schedule import Placement, Schedule, ScheduleError, StageGraph, check, one_to_one
from penstock.schedule.messages import BUFFERED
from penstock.simulation import Timeline, footprint, room_for_activations, simulate
from penstock.simulation.memory_footprint import in_bytes
from penstock.unknown_names import refuse_unknown

if TYPE_CHECKING:
    from penstock.planning.annealing import Incumbent
    from penstock.planning.joint.search import JointSearch
    from penstock.planning.search import Search


_MOST_UNMEASURED = 5_000
"""Ops up to which a proof is short, so that a guess of its time will do; above, the first order is proved at once and
the time that it took is spared for the last."""

_PROOF_SECONDS, _PROOF_SECONDS_AN_OP = 0.01, 2.5e-5
_SPARED = 1.2
"""Of what a proof took, the share spared for the next."""

MOST_LISTED = 20_000
"""Deals above which only the deal in turn is searched, and the others are bounded by their work alone."""
_MOST_POSED = 33
"""Deals that are made problems of their own at most."""
_FIRST_SHARE, _OTHERS_SHARE = 0.4, 0.2
"""Shares of the time for the deal in turn, which comes first, and then for the other deals together."""

Deal = tuple[int, ...]


S = TypeVar("S", bound="Incumbent[Any]")


@refuse_unknown(ScheduleError)
@names_options(PlanRequest)
def plan(
    costs: Costs, num_ranks: int, num_microbatches: int, links: Links | None = None, **options: Unpack[PlanOptions]
) -> Plan:
    """Searches for the best order of ops, and proves a bound that no order can beat.

    The search computes lower bounds, builds greedy orders, improves them forward and backward, and searches around
    them. It solves small problems with CP-SAT if that is installed (extra `exact`). It stops when the gap is closed
    or the time is spent. Plan and bound belong to the family of schedules that `Certificate` names: those with the
    given placement, within what `split`, `recompute` and `deal` allow.

    If microbatches differ (`Costs.uneven`), the schedule is made for the mean microbatch, or for a heavier one if
    memory is short. The microbatches then run in the best order found (`microbatch_order`); the bound holds for any
    order. In that case backwards are split unless `split` is False, nothing is recomputed, and microbatches are dealt
    to the pipelines in turn.

    If the costs have an `overlap`, a forward and a full backward that follow each other on a rank may run as a pair.
    The bound then holds for schedules with pairs too.

    Args:
        costs: costs of each stage.
        num_ranks, num_microbatches: counts of the schedule.
        links: delays of links (ms). Default: messages arrive at once.
        max_in_flight: most forwards that a rank may have started without having ended their W (or B), with each
            stage's forwards counted as one. One number, or one per rank.
        memory_limit: the same limit in the unit of `costs.activation`, of which I frees `costs.freed_by_input`.
        total_limit: most bytes that a rank may hold in all, as `ps.footprint` counts them: weights, gradients, the
            optimizer's state, activations and messages. If messages need more than the plan leaves for them, the
            search starts again with less room for activations. The bound considers activations alone.
        time_limit: seconds for everything, proofs included. A first order is built and proved whatever the limit.
        objective: "makespan"; or "span", the longest time from a rank's first start to its last end.
        dispatch: how the schedule will be run. With "hinted" or "dynamic", candidates are timed under that dispatch.
        channels: what carries the messages in the framework that runs the plan, see `schedule.messages`. With any
            other than "buffered" the plan has its messages as ops, placed for this channel, and its makespan is what
            `simulate` says with the same channels. Links may have a bandwidth there.
        placement: which rank hosts which stage, or a name from `ps.placements.NAMES`, like "v-shape". Default: stage
            i on rank i; stages of a graph go where the first orders are shortest.
        split: True for I and W everywhere, False for B everywhere. By default each op may be a B if that takes less
            time than I and W. Otherwise an I directly followed by its W is as good.
        recompute: whether forwards may run again, so that they keep only `costs.kept_by_recompute` until then. By
            default they may if the costs give that share. It helps only under a `memory_limit`.
        offload: whether activations may wait in host memory between their F and their backward, and how much of them
            at once: a number per rank, or one for all, in the unit of the limit; True for any amount. Each activation
            moves by itself. The ops OFFLOAD and RELOAD move it; they run beside the rank's own ops, one after the
            other. `costs.other` gives their times. By default nothing is offloaded.
        deal: how many microbatches each pipeline gets: "any", "in turn" (as evenly as possible), or their counts.
        stages: how the stages depend on one another, with registered ops. Default: a chain.
        seed: of the random numbers. Results may still differ, as the time left decides how far the search gets.
        stop_at_gap: the gap, as a share of the bound, at which the search ends.
        progress: called with `Progress` now and then, unless the costs have an overlap. If it raises
            KeyboardInterrupt, or the user presses Ctrl-C, the search ends and returns the best plan so far.

    Returns:
        The best plan found, with its bound.

    Raises:
        ScheduleError: invalid counts, limits or options, or limits that no schedule meets. Channels, recompute,
            offload, pairs, and shared and branching stages are planned for the makespan of a frozen order only.
        CostError: costs or links for other stages or ranks, costs of own ops that `stages` does not have, costs that
            do not say how long the way to host memory takes, or an overlap of pairs or uneven microbatches in a case
            that is planned without them.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs.uniform(4, f=10, i=10, w=10)
        >>> found = ps.plan(costs, num_ranks=4, num_microbatches=12, links=ps.Links({(0, 1): 20.0}))
        >>> found.makespan, found.lower_bound
        (410.0, 410.0)

    References:
        Zero Bubble Pipeline Parallelism (ICLR 2024) splits backwards. PipeMorph (NSDI 2026), section 4, plans for
        late links. docs/planning.md explains the bound.
    """
    request = _request(costs, num_ranks, num_microbatches, links, options)
    is_compiled()  # a checkout whose sources changed builds its library now, and not in the time of the search
    try:
        return planned(request)
    except ScheduleError as error:
        if error.rule in ("bound", "confirmed"):
            raise _with_problem(error, request) from error
        raise


def _with_problem(error: ScheduleError, request: PlanRequest) -> ScheduleError:
    """The error of a wrong bound or value, with all that the planner was asked, so that it can be asked again."""
    given = asdict(replace(request, progress=None))
    return ScheduleError(
        f"{error}. This is a bug in penstock: please report it with the problem, {given}", rule=error.rule
    )


def _request(
    costs: Costs, num_ranks: int, num_microbatches: int, links: Links | None, options: PlanOptions
) -> PlanRequest:
    """What was asked, if it can be planned."""
    require_costs(costs)
    for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} is {count!r}: give a whole number of at least 1", rule="options")
    given: dict[str, Any] = dict(options)
    given["stages"] = stages = _stages(costs, options.get("stages"))
    if given.get("placement") is not None or stages is None:
        given["placement"] = _placement(costs, num_ranks, options.get("placement"))
    request = PlanRequest(costs, num_ranks, num_microbatches, Links.of(links), **given)
    require_plannable(request)
    return request


def planned(request: PlanRequest) -> Plan:
    """Takes the first road that a request needs. The modules are read here, so that `import penstock` stays light."""
    if request.channels != BUFFERED:
        from penstock.planning.channel import plan_on_channel

        return plan_on_channel(request, planned)
    if request.total_limit is not None:
        return _within_total(request)
    if request.costs.overlap is not None:
        from penstock.planning.paired import plan_pairs

        return plan_pairs(request, planned)
    if request.costs.factors:
        from penstock.planning.uneven import plan_uneven

        return plan_uneven(request, planned)
    if not request.is_chain:
        from penstock.planning.graph.search import plan_graph

        return plan_graph(request)
    return _plan_chain(request)


def _plan_chain(request: PlanRequest) -> Plan:
    """Searches the deals of microbatches to pipelines, each as one problem."""
    from penstock.planning import strategy
    from penstock.planning.joint import search as joint
    from penstock.planning.joint.problem import pose_joint
    from penstock.planning.problem import pose

    began, time_limit = time.perf_counter(), float(request.time_limit)
    costs, num_ranks, num_microbatches = request.costs, request.num_ranks, request.num_microbatches
    links, placement = request.links, request.placement
    assert placement is not None
    family = family_of(request)
    kept = costs.kept if family.forms.again else 1.0
    limits = limits_of(
        costs, placement, num_ranks, request.max_in_flight, request.memory_limit, family.forms.split, kept,
        request.offload,
    )  # fmt: skip
    num_ops = (3 if family.forms.split else 2) * placement.num_stages * num_microbatches
    plain = in_turn(num_microbatches, placement.num_pipelines)
    given = read_deal(request.deal, num_microbatches, placement.num_pipelines)
    counts = plain if given is None and request.objective == "span" else given

    def begin(counts: tuple[int, ...]) -> Search | JointSearch:
        if family.joint:
            posed = pose_joint(costs, placement, num_ranks, counts, links, limits, family.forms)
            return joint.begin(posed, request.seed, request.stop_at_gap, request.progress, began)
        problem = pose(
            costs, placement, num_ranks, num_microbatches, links, limits.held, limits.cap, family.forms.split, counts
        )
        return strategy.begin(
            problem, request.objective, request.seed, request.stop_at_gap, request.progress, began, time_limit
        )

    def run(search: Search | JointSearch, until: float) -> bool:
        search.until = until
        return joint.run(search) if isinstance(search, joint.JointSearch) else strategy.run(search)

    proved = partial(_proved, request, limits)
    first = begin(counts or plain)
    first_value = first.value
    done, spared = None, _PROOF_SECONDS + _PROOF_SECONDS_AN_OP * num_ops
    if num_ops > _MOST_UNMEASURED:
        before = first.seconds
        done = proved(first.schedule("plan", limits.in_flight))
        spared = _SPARED * (first.seconds - before)
    likely, rest = (
        likely_deals(costs, placement, num_ranks, num_microbatches, links) if counts is None else ([], math.inf)
    )
    search, goes_on = search_deals(first, likely, rest, begin, run, time_limit - spared)
    value = search.value - search.shift
    if request.mode.is_dynamic and not isinstance(search, joint.JointSearch):
        row, value = _best_dynamic(search, request, limits)
        schedule, timeline = proved(search.problem.schedule(row, "plan", limits.in_flight))
    elif done is not None and search is first and search.value == first_value:
        schedule, timeline = done
    else:
        schedule, timeline = proved(search.schedule("plan", limits.in_flight))
    value = confirmed(request.objective, value, timeline)
    bound = certain(search.lower_bound - search.shift, value)
    dealt = "any" if counts is None else "in turn" if request.deal in ("any", "in turn") else f"as given {counts}"
    certificate = Certificate(placement, family.backward, dealt, family.recompute, family.offload)
    took, seconds = timeline.makespan, time.perf_counter() - began
    return Plan(schedule, took, value, bound, certificate, seconds, search.how, timeline, interrupted=not goes_on)


def _proved(request: PlanRequest, limits: Limits, schedule: Schedule) -> tuple[Schedule, Timeline]:
    check(schedule)
    timeline = _timed(request, limits, schedule)
    if request.mode.is_dynamic:  # it was timed in the unit of the caps
        ran = simulate(timeline.executed(), request.costs, links=request.links)
        timeline = replace(timeline, peak_activations=ran.peak_activations)
    return schedule, timeline


def _timed(request: PlanRequest, limits: Limits, schedule: Schedule) -> Timeline:
    """Simulates; where not frozen under the plan's own limits, in their unit."""
    if not request.mode.is_dynamic:
        return simulate(schedule, request.costs, links=request.links)
    cap = None if math.isinf(min(limits.cap)) else limits.cap
    return simulate(
        schedule, limits.counted(request.costs), links=request.links, dispatch=request.mode, memory_limit=cap
    )


def _best_dynamic(search: Search, request: PlanRequest, limits: Limits) -> tuple[Any, float]:
    """Of the orders the search found good, the one that runs best where ranks may run any ready op."""
    best: tuple[float, Any] | None = None
    took = 0.0
    for row in search.good_rows():
        before = search.seconds
        # The best is run once more to be proved.
        if best is not None and before + _SPARED * 2 * took > request.time_limit:
            break
        schedule = search.problem.schedule(row, "plan", limits.in_flight)
        value = measured(_timed(request, limits, schedule), request.objective)
        took = max(took, search.seconds - before)
        if best is None or value < best[0]:
            best = value, row
    assert best is not None
    return best[1], best[0]


def _within_total(request: PlanRequest) -> Plan:
    """A plan that holds no more than `total_limit`, which counts everything: again with less room for activations,
    till what messages take fits beside them.

    Each search takes at most half of the time that is left.
    """
    began = time.perf_counter()
    costs, placement = request.costs, request.placement
    assert placement is not None
    assert request.total_limit is not None
    require_weights(costs)
    totals = per_rank("total_limit", request.total_limit, request.num_ranks)
    left = room = room_for_activations(placement, costs, totals)
    within = replace(request, total_limit=None)
    found = planned(replace(within, memory_limit=room, time_limit=request.time_limit / 2))
    bound = found.lower_bound  # of activations alone, so it holds for all that fits
    messages = [0.0] * len(left)
    for tries in range(1 + MOST_AGAIN):
        held = footprint(found.schedule, costs, request.links, dispatch=request.dispatch, memory_limit=room)
        if all(each <= most for each, most in zip(held.totals, totals, strict=True)):
            return replace(found, lower_bound=bound, seconds=time.perf_counter() - began)
        messages = [max(seen, rank.messages) for seen, rank in zip(messages, held.ranks, strict=True)]
        room = tuple(each - kept for each, kept in zip(left, messages, strict=True))
        if min(room) <= 0 or tries == MOST_AGAIN:
            break
        left_s = 0.0 if found.interrupted else request.time_limit - (time.perf_counter() - began)
        found = planned(replace(within, memory_limit=room, time_limit=max(0.01, left_s / 2)))
    rank = max(range(len(left)), key=lambda r: messages[r] / left[r])
    raise ScheduleError(
        f"rank {rank} has {in_bytes(left[rank], 4)} beside weights, gradients and optimizer state, and activations "
        f"with messages of {in_bytes(messages[rank], 4)} take more; raise the limit",
        rule="memory",
        rank=rank,
    )


def _stages(costs: Costs, stages: StageGraph | None) -> StageGraph | None:
    """The stage graph; None for a chain."""
    if stages is None:
        return None
    if not isinstance(stages, StageGraph):
        raise ScheduleError(f"stages is {stages!r}: give a ps.schedule.StageGraph", rule="stages")
    costs.require_stages(stages.num_stages, "the stage graph has")
    return None if stages.is_chain else stages


def _placement(costs: Costs, num_ranks: int, placement: Placement | str | None) -> Placement:
    if isinstance(placement, str):
        return placements.named(placement, num_ranks, costs.num_stages)
    if placement is None:
        if costs.num_stages != num_ranks:
            raise CostError(
                f"the costs are for {costs.num_stages} stages, and there are {num_ranks} ranks; "
                "say with `placement` where they go"
            )
        return one_to_one(num_ranks)
    if not isinstance(placement, Placement):
        raise ScheduleError(
            f"placement is {placement!r}: give one of ps.placements, or a name such as 'v-shape'", rule="placement"
        )
    costs.require_stages(placement.num_stages, "the placement for")
    hosts = [(f"pipeline {p} places a stage on", max(ranks)) for p, ranks in enumerate(placement.pipelines)]
    hosts += [(f"stage {stage} is shared by", max(ranks)) for stage, ranks in placement.shared]
    for who, rank in hosts:
        if rank >= num_ranks:
            raise ScheduleError(f"{who} rank {rank}, but ranks go to {num_ranks - 1}", rule="placement")
    return placement


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
        return [], num_microbatches * sum(least_work(costs)) / num_ranks
    plain = in_turn(num_microbatches, num_pipelines)
    deals = np.array(list(all_deals(num_microbatches, num_pipelines)), np.int64)
    bounds = quick_bound(deals, placement, num_ranks, costs.f, least_work(costs), links)
    order = np.lexsort((np.abs(deals - np.array(plain)).sum(axis=1), bounds))
    likely = [(tuple(deals[k].tolist()), float(bounds[k])) for k in order[:_MOST_POSED]]
    rest = float(bounds[order[_MOST_POSED:]].min(initial=math.inf))
    return [(deal, bound) for deal, bound in likely if deal != plain], rest


def search_deals(
    first: S,
    likely: Sequence[tuple[Deal, float]],
    rest: float,
    begin: Callable[[Deal], S],
    run: Callable[[S, float], bool],
    time_limit: float,
) -> tuple[S, bool]:
    """Searches until the bound of all deals is met, `time_limit` (seconds since the first began) is over, or an
    interrupt from the keyboard ends a search.

    Returns the search with the best schedule, its bound that of all deals, and whether no interrupt came.

    Args:
        first: the search of the first deal, begun.
        likely, rest: the other deals, as `likely_deals` gives them.
        run: searches until the time it is given, and returns whether no interrupt ended the search.
    """
    best, others = first, list[S]()
    goes_on = not likely or run(first, _FIRST_SHARE * time_limit)
    until = (_FIRST_SHARE + _OTHERS_SHARE) * time_limit
    for deal, bound in likely:
        if not goes_on or first.seconds > until:
            rest = min(rest, bound)
        else:
            others.append(begin(deal))
    others.sort(key=lambda each: each.lower_bound)
    for number, each in enumerate(others):
        if goes_on and each.lower_bound < best.value * (1 - EPSILON):
            goes_on = run(each, each.seconds + max(0.0, until - each.seconds) / (len(others) - number))
            if each.value < best.value * (1 - EPSILON):
                best = each
    goes_on = goes_on and run(best, time_limit)
    best.lower_bound = min(rest, first.lower_bound, *(each.lower_bound for each in others))
    return best, goes_on
