"""`plan`: searches the best schedule for given costs, links and memory, and proves how good it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from penstock.cost import CostError, Costs, Links
from penstock.cost.costs import require_costs
from penstock.dispatch import Dispatch
from penstock.engine import list_by_values, sweep
from penstock.engine.tolerance import slack
from penstock.planning.family import Certificate, check_options, family_of, in_turn, read_deal, read_offload
from penstock.planning.limits import MOST_AGAIN, Limits, limits_of, per_rank, require_one_limit, require_weights
from penstock.planning.progress import Progress, certain, confirmed, gap, measured
from penstock.planning.result import Plan
from penstock.program import placements
from penstock.schedule import Placement, Schedule, ScheduleError, StageGraph, check, one_to_one
from penstock.schedule.channels import BUFFERED
from penstock.simulation import Timeline, footprint, room_for_activations, simulate
from penstock.simulation.memory_footprint import in_bytes
from penstock.simulation.simulator import as_dispatch
from penstock.unknown_names import refuse_unknown

if TYPE_CHECKING:
    from penstock.planning.joint.search import JointSearch
    from penstock.planning.search import Search


SHARE_AGAIN = 0.2
"""Of the time limit the share that each search has at least that begins again with less room."""

_MOST_UNMEASURED = 5_000
"""Ops up to which a proof is short, so that a guess of its time will do; above, the first order is proved at once and
the time that it took is spared for the last."""

_PROOF_SECONDS, _PROOF_SECONDS_AN_OP = 0.01, 2.5e-5
_SPARED = 1.2
"""Of what a proof took, the share spared for the next."""

_FIRST_SECONDS_AN_OP = 3e-6
"""What a first order and its proof take in a large problem, compiled."""


@refuse_unknown(ScheduleError)
def plan(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    links: Links | None = None,
    *,
    max_in_flight: float | Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    total_limit: float | Sequence[float] | None = None,
    time_limit: float = 10.0,
    objective: str = "makespan",
    dispatch: Dispatch | str = Dispatch.FROZEN,
    channels: str = BUFFERED,
    placement: Placement | str | None = None,
    split: bool | None = None,
    recompute: bool | None = None,
    offload: bool | float | Sequence[float] | None = None,
    deal: str | Sequence[int] = "any",
    stages: StageGraph | None = None,
    seed: int = 0,
    stop_at_gap: float = 1e-4,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Searches for the best order of ops, and proves a bound that no order can beat.

    The search computes lower bounds, builds greedy orders, improves them forward and backward, and searches around
    them. It solves small problems with CP-SAT if that is installed (extra `exact`). It stops when the gap is closed
    or the time is spent.

    If microbatches differ (`Costs.uneven`), the schedule is made for the mean microbatch, or for a heavier one if
    memory is short. The microbatches then run in the best order found (`microbatch_order`); the bound holds for any
    order. In that case backwards are split unless `split` is False, nothing is recomputed, and microbatches are dealt
    to the pipelines in turn.

    If the costs have an `overlap`, a forward and a full backward that follow each other on a rank may run as a pair.
    The bound then holds for schedules with pairs too. Pairs are planned for the makespan of a frozen order.

    Plan and bound belong to the family of schedules that `Certificate` names: those with the given placement, within
    what `split`, `recompute` and `deal` allow. What these leave open is decided op by op, together with the order.

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
        time_limit: seconds for everything, including compiling and proving the result. A first order is built and
            proved whatever the limit. Problems of more than 30,000 ops compile what they need first (see
            `compile_ahead`).
        objective: "makespan"; or "span", the longest time from a rank's first start to its last end.
        dispatch: how the schedule will be run. With "hinted" or "dynamic", candidates are timed under that dispatch.
        channels: what carries the messages in the framework that runs the plan, see `schedule.channels`. With any
            other than "buffered" the plan has its messages as ops, placed for this channel, and its makespan is what
            `simulate` says with the same channels. Links may have a bandwidth there. Such plans are for the makespan
            of a frozen order.
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
        seed: seed of the random numbers. Results may still differ from run to run, because the time left decides how
            far the search gets.
        stop_at_gap: the gap, as a share of the bound, at which the search ends.
        progress: called with `Progress` now and then, unless the costs have an overlap. If it raises
            KeyboardInterrupt, or the user presses Ctrl-C, the search ends and returns the best plan so far.

    Returns:
        The best plan found, with its bound.

    Raises:
        ScheduleError: invalid counts, limits or options, or limits that no schedule meets. Recomputing and offloading
            are planned for the makespan of a frozen order only. To ask for them with another objective or dispatch,
            with shared stages or with stages that branch, is an error. Shared and branching stages are planned for
            the makespan of a frozen order only, too.
        CostError: costs or links for other stages or ranks, costs that do not say how long the way to host memory
            takes, or an overlap of pairs or uneven microbatches in a case that is planned without them.

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
    began = time.perf_counter()
    links = Links.of(links)
    require_costs(costs)
    stages = _stages(costs, stages)
    options: dict[str, Any] = {
        "max_in_flight": max_in_flight, "memory_limit": memory_limit, "total_limit": total_limit,
        "objective": objective, "dispatch": dispatch, "split": split, "recompute": recompute, "offload": offload,
        "deal": deal, "seed": seed, "stop_at_gap": stop_at_gap, "progress": progress,
    }  # fmt: skip

    def given(*names: str) -> dict[str, Any]:
        return {name: options[name] for name in names}

    if not _is_number(time_limit) or not float(time_limit) > 0:
        raise ScheduleError(f"time_limit is {time_limit!r}: give seconds above 0", rule="options")
    if channels != BUFFERED:
        from penstock.planning.channel import plan_on_channel

        where = _placement(costs, num_ranks, num_microbatches, placement)
        return plan_on_channel(
            plan, costs, num_ranks, num_microbatches, links, where, channels, stages, time_limit=float(time_limit),
            **options,
        )  # fmt: skip
    links.require_constant("ps.plan")
    if total_limit is not None:
        require_one_limit(total_limit=total_limit, memory_limit=memory_limit, max_in_flight=max_in_flight)
        if placement is None and stages is not None:
            raise ScheduleError(
                "total_limit with stages that branch needs a placement, as weights lie where it says; give one",
                rule="options",
            )
        where = _placement(costs, num_ranks, num_microbatches, placement)

        def again(room: Sequence[float], seconds: float) -> Plan:
            less = {**options, "memory_limit": room, "total_limit": None, "time_limit": seconds}
            return plan(costs, num_ranks, num_microbatches, links, placement=where, stages=stages, **less)

        totals = per_rank("total_limit", total_limit, num_ranks)
        return _within(again, costs, where, links, dispatch, totals, time_limit)
    if placement is not None or stages is None:
        placement = _placement(costs, num_ranks, num_microbatches, placement)
    else:
        _check_counts(num_ranks, num_microbatches)
    num_pipelines = 1 if placement is None else placement.num_pipelines
    beyond = "stages that branch" if stages is not None else "placements with shared stages"
    general = stages is not None or (placement is not None and bool(placement.shared))
    if objective not in ("makespan", "span"):
        raise ScheduleError(f"objective {objective!r}: give 'makespan' or 'span'", rule="options")
    mode = as_dispatch(dispatch)
    links.check_ranks(num_ranks)
    if progress is not None and not callable(progress):
        raise ScheduleError(f"progress is {progress!r}: give a function of a Progress", rule="options")
    if not _is_number(stop_at_gap) or not float(stop_at_gap) >= 0:
        raise ScheduleError(f"stop_at_gap is {stop_at_gap!r}: give a share of at least 0", rule="options")
    check_options(split, recompute)
    away = read_offload(offload, costs)
    if costs.overlap is not None:
        from penstock.planning.paired import plan_pairs, require_plannable

        require_plannable(objective, mode.is_dynamic, general, away, bool(costs.factors))
        assert placement is not None
        return plan_pairs(
            plan, costs, num_ranks, num_microbatches, links, placement, time_limit=float(time_limit),
            **given("split", "max_in_flight", "memory_limit", "recompute", "deal", "seed", "stop_at_gap"),
        )  # fmt: skip
    if costs.factors:
        turn = deal in ("any", "in turn")
        if objective != "makespan" or general or recompute or away or not turn:
            what = f"a problem of {beyond}" if general else f"objective {objective!r}"
            what = "recompute=True" if recompute else what if turn else f"deal {deal!r}"
            what = f"offload={offload!r}" if away else what
            raise CostError(
                f"the costs have uneven microbatches, and {what} is planned for microbatches that all cost the same; "
                "leave `uneven` out, and order the microbatches of the plan with ps.planning.order_microbatches"
            )
        assert placement is not None
        return _plan_uneven(
            costs, num_ranks, num_microbatches, links, max_in_flight, memory_limit, float(time_limit), mode,
            placement, split is not False, seed, stop_at_gap, progress,
        )  # fmt: skip
    plain_makespan = objective == "makespan" and not mode.is_dynamic
    if (recompute or away) and (general or not plain_makespan):
        asked = beyond if general else f"objective {objective!r}, dispatch {mode.value!r}"
        what, who = (
            ("recompute=True", "forwards that run again") if recompute else (f"offload={offload!r}", "offloads")
        )
        instead = "recompute out, or use ps.passes.recompute on the schedule" if recompute else "offload out"
        raise ScheduleError(
            f"{what} with {asked}: {who} are planned for the makespan of a frozen order, of a chain of stages that "
            f"one rank runs each; leave {instead}",
            rule="options",
        )
    counts = read_deal(deal, num_microbatches, num_pipelines)
    if general:
        if objective != "makespan" or mode.is_dynamic:
            raise ScheduleError(
                f"objective {objective!r} with dispatch {mode.value!r}: {beyond} are planned for the makespan of a "
                "frozen order",
                rule="options",
            )
        if counts != in_turn(num_microbatches, num_pipelines) and deal != "any":
            raise ScheduleError(f"deal is {deal!r}, but {beyond} are dealt in turn; leave deal out", rule="options")
        from penstock.planning import compile_ahead as compiling
        from penstock.planning.graph.plan import plan_graph

        compiling.begin()
        return plan_graph(
            costs, num_ranks, num_microbatches, links, placement=placement, stages=stages,
            time_limit=float(time_limit),
            **given("max_in_flight", "memory_limit", "split", "seed", "stop_at_gap", "progress"),
        )  # fmt: skip
    assert placement is not None
    family = family_of(
        costs, split, recompute, memory_limit is not None, plain_makespan, away, max_in_flight is not None
    )
    limits = limits_of(
        costs, placement, num_ranks, max_in_flight, memory_limit, family.forms.split,
        costs.kept if family.forms.again else 1.0, offload,
    )  # fmt: skip

    # Here, so that `import penstock` stays light.
    from penstock.planning import compile_ahead, longest_paths, microbatch_counts, strategy
    from penstock.planning.joint import search as joint
    from penstock.planning.joint.problem import pose_joint
    from penstock.planning.problem import pose
    from penstock.planning.threads import MOST_UNCOMPILED

    num_ops = (3 if family.forms.split else 2) * placement.num_stages * num_microbatches
    if num_ops <= MOST_UNCOMPILED:
        compile_ahead.begin()
    elif objective == "makespan" and not family.joint:
        compile_ahead.wait_for_first_order(
            float(time_limit) - _FIRST_SECONDS_AN_OP * num_ops - (time.perf_counter() - began)
        )
    else:
        compile_ahead.wait_for(list_by_values, sweep, longest_paths)
    if counts is None and objective == "span":
        counts = in_turn(num_microbatches, placement.num_pipelines)
    ways: microbatch_counts.DealSearches[Search | JointSearch]
    if counts is None:
        ways = microbatch_counts.deals_of(costs, placement, num_ranks, num_microbatches, links)
    else:
        ways = microbatch_counts.DealSearches([counts], math.inf)

    def begin(counts: tuple[int, ...]) -> Search | JointSearch:
        if family.joint:
            posed = pose_joint(costs, placement, num_ranks, counts, links, limits, family.forms)
            return joint.begin(posed, seed, stop_at_gap, progress, began)
        problem = pose(
            costs, placement, num_ranks, num_microbatches, links, limits.held, limits.cap, family.forms.split, counts
        )
        search = strategy.begin(problem, objective, seed, stop_at_gap, progress, began)
        search.until = float(time_limit)
        strategy.first_order(search)
        return search

    def run(search: Search | JointSearch, until: float) -> None:
        search.until = until
        if isinstance(search, joint.JointSearch):
            joint.run(search)
        else:
            strategy.run(search)

    def proved(schedule: Schedule) -> tuple[Schedule, Timeline]:
        check(schedule)
        return schedule, _timed(schedule, costs, links, mode, limits)

    first = begin(ways.listed[0])
    first_value = first.value
    done, spared = None, _PROOF_SECONDS + _PROOF_SECONDS_AN_OP * num_ops
    if num_ops > _MOST_UNMEASURED:
        before = first.seconds
        done = proved(first.schedule("plan", limits.in_flight))
        spared = _SPARED * (first.seconds - before)
    search = ways.run(first, begin, run, float(time_limit) - spared)
    bound, value = search.lower_bound - search.shift, search.value - search.shift
    if mode.is_dynamic and not isinstance(search, joint.JointSearch):
        row, value = _best_dynamic(search, costs, links, objective, mode, limits, float(time_limit))
        schedule, timeline = proved(search.problem.schedule(row, "plan", limits.in_flight))
    elif done is not None and search is first and search.value == first_value:
        schedule, timeline = done
    else:
        schedule, timeline = proved(search.schedule("plan", limits.in_flight))
    value = confirmed(objective, value, timeline)
    bound = certain(bound, value, search.problem.described)
    certificate = Certificate(
        placement,
        family.backward,
        "any" if counts is None else "in turn" if deal in ("any", "in turn") else f"as given {counts}",
        family.recompute,
        family.offload,
    )
    seconds = time.perf_counter() - began
    return Plan(schedule, timeline.makespan, value, bound, certificate, seconds, search.how, timeline)


def _within(
    again: Callable[[Sequence[float], float], Plan],
    costs: Costs,
    placement: Placement,
    links: Links,
    dispatch: Dispatch | str,
    totals: Sequence[float],
    time_limit: float,
) -> Plan:
    """A plan that holds no more than `totals`, which count everything.

    Args:
        again: plans with so much room for activations on each rank, within so many seconds.
    """
    began = time.perf_counter()
    require_weights(costs)
    left = room = room_for_activations(placement, costs, totals)
    found = again(room, time_limit)
    bound = found.lower_bound  # of activations alone, so it holds for all that fits
    messages = [0.0] * len(left)
    for tries in range(1 + MOST_AGAIN):
        held = footprint(found.schedule, costs, links, dispatch=dispatch, memory_limit=room)
        if all(each <= most for each, most in zip(held.totals, totals, strict=True)):
            return replace(found, lower_bound=bound, seconds=time.perf_counter() - began)
        messages = [max(seen, rank.messages) for seen, rank in zip(messages, held.ranks, strict=True)]
        room = tuple(each - kept for each, kept in zip(left, messages, strict=True))
        if min(room) <= 0 or tries == MOST_AGAIN:
            break
        found = again(room, max(time_limit - (time.perf_counter() - began), SHARE_AGAIN * time_limit))
    rank = max(range(len(left)), key=lambda r: messages[r] / left[r])
    raise ScheduleError(
        f"rank {rank} has {in_bytes(left[rank], 4)} beside weights, gradients and optimizer state, and activations "
        f"with messages of {in_bytes(messages[rank], 4)} take more; raise the limit",
        rule="memory",
        rank=rank,
    )


def _plan_uneven(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    links: Links,
    max_in_flight: float | Sequence[float] | None,
    memory_limit: float | Sequence[float] | None,
    time_limit: float,
    mode: Dispatch,
    placement: Placement,
    split: bool,
    seed: int,
    stop_at_gap: float,
    progress: Callable[[Progress], None] | None,
) -> Plan:
    """A plan for the mean microbatch, or a heavier one, and the best order of the real ones in it."""
    from penstock.planning import exact
    from penstock.planning.uneven import EXACT_OPS, EXACT_SHARE, best_uneven, exact_uneven_bound, uneven_bound

    began = time.perf_counter()

    def make(even: Costs, seconds: float) -> tuple[Schedule, str]:
        found = plan(
            even, num_ranks, num_microbatches, links, max_in_flight=max_in_flight, memory_limit=memory_limit,
            time_limit=seconds, placement=placement, split=split, recompute=False, deal="in turn", seed=seed,
            stop_at_gap=stop_at_gap, progress=progress,
        )  # fmt: skip
        return found.schedule, found.how

    num_ops = num_microbatches * costs.num_stages * (3 if split else 2)
    asks = exact.available() and num_ops <= EXACT_OPS
    spent = time_limit * (1 - EXACT_SHARE) if asks else time_limit
    candidate, search, how = best_uneven(
        costs, num_microbatches, links, memory_limit, max_in_flight, mode, spent, seed, make
    )
    schedule = search.schedule(candidate) if mode.is_dynamic else search.executed(candidate)
    check(schedule)
    # By the costs in which the caps are given: it is refused if the order is above them.
    timeline = simulate(schedule, search.costs, links=links, dispatch=mode, memory_limit=search.caps)
    if not mode.is_dynamic:
        timeline = simulate(schedule, costs, links=links)
    value = timeline.makespan
    if value > candidate.makespan + slack(value):
        raise ScheduleError(
            f"the plan says {candidate.makespan!r} ms, its simulation {value!r} ms: a bug in penstock",
            rule="confirmed",
        )
    bound = uneven_bound(candidate, links)
    left = time_limit - (time.perf_counter() - began) - exact.STOPPING
    if asks and left > 0 and gap(value, bound) > stop_at_gap:
        bound = max(bound, exact_uneven_bound(candidate, links, search.caps, value, left, seed))
    bound = certain(bound, value, lambda: f"costs {costs!r} over {placement!r}")
    certificate = Certificate(placement, "split" if split else "whole", order="any")
    return Plan(
        schedule, value, value, bound, certificate, time.perf_counter() - began, how, timeline,
        tuple(candidate.order.tolist()),
    )  # fmt: skip


def _timed(schedule: Schedule, costs: Costs, links: Links, mode: Dispatch, limits: Limits) -> Timeline:
    """Simulates; where not frozen under the plan's own limits, in their unit."""
    if not mode.is_dynamic:
        return simulate(schedule, costs, links=links)
    held = replace(costs, activation=[h for h, _ in limits.held], freed_by_input=limits.held[0][1])
    return simulate(
        schedule, held, links=links, dispatch=mode, memory_limit=None if math.isinf(min(limits.cap)) else limits.cap
    )


def _best_dynamic(
    search: Search, costs: Costs, links: Links, goal: str, mode: Dispatch, limits: Limits, time_limit: float
) -> tuple[Any, float]:
    """Of the orders the search found good, the one that runs best where ranks may run any ready op."""
    best: tuple[float, Any] | None = None
    took = 0.0
    for row in search.good_rows():
        before = search.seconds
        if best is not None and before + _SPARED * 2 * took > time_limit:  # the best is run once more to be proved
            break
        schedule = search.problem.schedule(row, "plan", limits.in_flight)
        value = measured(_timed(schedule, costs, links, mode, limits), goal)
        took = max(took, search.seconds - before)
        if best is None or value < best[0]:
            best = value, row
    assert best is not None
    return best[1], best[0]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _stages(costs: Costs, stages: StageGraph | None) -> StageGraph | None:
    """The stage graph; None for a chain."""
    if stages is None:
        return None
    if not isinstance(stages, StageGraph):
        raise ScheduleError(f"stages is {stages!r}: give a ps.schedule.StageGraph", rule="stages")
    costs.require_stages(stages.num_stages, "the stage graph has")
    return None if stages.is_chain else stages


def _check_counts(num_ranks: int, num_microbatches: int) -> None:
    for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} is {count!r}: give a whole number of at least 1", rule="options")


def _placement(costs: Costs, num_ranks: int, num_microbatches: int, placement: Placement | str | None) -> Placement:
    _check_counts(num_ranks, num_microbatches)
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
    for pipeline, hosts in enumerate(placement.pipelines):
        if max(hosts) >= num_ranks:
            raise ScheduleError(
                f"pipeline {pipeline} places a stage on rank {max(hosts)}, but ranks go to {num_ranks - 1}",
                rule="placement",
            )
    return placement
