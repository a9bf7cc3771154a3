"""Plans stages that branch and join, and stages and registered ops that several ranks run together.

    starts       the library's schedule, rules, one turn after the other
    bound        what no schedule can undercut
    walked       local search over one sequence of all ops
    exact        the shortest order of all ops, and a bound

Each step stops when the bound is met or its share of the time is spent. The last needs CP-SAT (extra `exact`);
without it its time goes to local search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

from penstock.cost import Costs
from penstock.cost.cut import partition
from penstock.dispatch.queues import depths
from penstock.planning.annealing import annealed
from penstock.planning.graph import search as searches
from penstock.planning.graph.problem import pose_graph
from penstock.planning.options import Limits, PlanRequest, limits_of
from penstock.planning.progress import certain, confirmed
from penstock.planning.result import Certificate, Plan
from penstock.schedule import Placement, ScheduleError, StageGraph, check
from penstock.simulation import simulate

_CHOOSING_SHARE = 0.3
"""Of the time, for trying placements where none is given."""
_STARTS_SHARE = 0.2
"""Of the time, for first orders besides the first."""
_PROOF_SECONDS_AN_OP = 4e-5


def plan_graph(request: PlanRequest) -> Plan:
    """The best schedule found.

    Tessel's MLLM on four ranks (F, E, H and their backwards 1 ms, B 3 ms):

        everyone = (0, 1, 2, 3)
        placement = Placement(((0, 0, 1, 2, 3, 0),), shared=((0, everyone), (5, everyone)))
        costs = Costs(f=[1] * 6, i=[0] * 6, w=[0] * 6, b=[1, 3, 3, 3, 3, 1])
        ps.plan(costs, 4, 12, placement=placement, split=False).makespan       # 8 * 12 + 12, proved

    Where `split` is left open, backwards are all split or all whole, whichever turns out shorter.

    Raises:
        ScheduleError: a cap below what one microbatch holds, or ops that plans do not take.
    """
    began, time_limit = time.perf_counter(), float(request.time_limit)
    costs, num_ranks, links, split = request.costs, request.num_ranks, request.links, request.split
    forms = [split] if split is not None else [True]
    if split is None and any(costs.b[s] < costs.i[s] + costs.w[s] for s in range(costs.num_stages)):
        forms.append(False)
    counted = request.max_in_flight is not None

    def limits(form: bool) -> Limits:
        return limits_of(costs, None, num_ranks, request.max_in_flight, request.memory_limit, form)

    def begin(where: Placement, form: bool) -> searches.GraphSearch:
        posed = pose_graph(
            costs, where, num_ranks, request.num_microbatches, links, limits(form), form, request.stages, counted
        )
        starts = chain([(posed.serial(), "serial")], searches.library_starts(posed, form))
        by_rules = searches.rule_starts(posed, costs, links, limits(form), form, counted)
        until = time.perf_counter() - began + _STARTS_SHARE * time_limit
        return searches.begin(
            posed, starts, by_rules, until, request.seed, request.stop_at_gap, request.progress, began
        )

    placement = request.placement
    if placement is None:
        assert request.stages is not None
        deadline = began + _CHOOSING_SHARE * time_limit
        placement = _chosen(
            placements_of(costs, request.stages, num_ranks), lambda where: begin(where, forms[0]), deadline
        )
    found: list[tuple[float, int, searches.GraphSearch]] = []
    for number, each in enumerate(forms):
        search = begin(placement, each)
        spared = _PROOF_SECONDS_AN_OP * search.problem.num_ops
        search.until = search.seconds + (time_limit - spared - search.seconds) / (len(forms) - number)
        interrupted = not searches.run(search)
        found.append((search.value, number, search))
        if interrupted:
            break
    _, number, search = min(found, key=lambda one: one[:2])
    form = forms[number]
    schedule = search.problem.schedule(search.sequence, "plan", limits(form).in_flight)
    check(schedule)
    timeline = simulate(schedule, costs, links=links)
    took = confirmed("makespan", search.value, timeline)
    proved = certain(search.lower_bound, took, search.problem.described)
    certificate = Certificate(placement, "split" if form else "whole", stages=request.stages)
    return Plan(schedule, took, took, proved, certificate, time.perf_counter() - began, search.how, timeline)


def _chosen(
    places: Sequence[Placement], begin: Callable[[Placement], searches.GraphSearch], deadline: float
) -> Placement:
    """Of several placements that whose first orders are shortest after a moment of search.

    Raises:
        ScheduleError: none leaves room within the limits.
    """
    found: list[tuple[float, int, Placement]] = []
    refused: ScheduleError | None = None
    for number, where in enumerate(places):
        left = deadline - time.perf_counter()
        if found and left <= 0:
            break
        try:
            search = begin(where)
        except ScheduleError as error:
            refused = error
            continue
        search.on_progress = None
        until = search.seconds + max(0.0, deadline - time.perf_counter()) / (len(places) - number)
        annealed(search, searches.SequenceWalk, until)
        found.append((search.value, number, where))
    if not found:
        assert refused is not None
        raise refused
    return min(found)[2]


def placements_of(costs: Costs, stages: StageGraph, num_ranks: int) -> list[Placement]:
    """Placements worth trying, each rank with at least one stage where there are as many.

    Four rules: stages in the order of their depth, cut into parts of about the same work; the same by number, so
    that each branch lies on ranks of its own; dealt to the ranks in turn, by depth; and each stage, the longest
    first, on the rank with least work so far.
    """
    num_stages = stages.num_stages
    work = [costs.f[s] + min(costs.b[s], costs.i[s] + costs.w[s]) for s in range(num_stages)]
    depth = depths(stages)
    by_depth = sorted(range(num_stages), key=lambda s: (depth[s], s))
    rows = [
        _cut(by_depth, work, num_ranks),
        _cut(list(range(num_stages)), work, num_ranks),
        _dealt_in_turn(by_depth, num_ranks),
        _packed(work, num_ranks),
    ]
    found: list[Placement] = []
    for row in rows:
        if (placement := Placement((tuple(row),))) not in found:
            found.append(placement)
    return found


def _cut(order: list[int], work: list[float], num_ranks: int) -> list[int]:
    """Stages in an order, cut into parts of about the same work."""
    row = [0] * len(order)
    for rank, part in enumerate(partition([work[stage] for stage in order], min(num_ranks, len(order)))):
        for place in part:
            row[order[place]] = rank
    return row


def _dealt_in_turn(order: list[int], num_ranks: int) -> list[int]:
    row = [0] * len(order)
    for place, stage in enumerate(order):
        row[stage] = place % num_ranks
    return row


def _packed(work: list[float], num_ranks: int) -> list[int]:
    row, load = [0] * len(work), [0.0] * num_ranks
    for stage in sorted(range(len(work)), key=lambda s: -work[s]):
        row[stage] = min(range(num_ranks), key=lambda r: (load[r], r))
        load[row[stage]] += work[stage]
    return row
