"""`ps.plan`: schedules within their limits, bounds that hold, and errors that say what to change."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.planning.bounds import busy_bound, jackson_bound, work_bound
from penstock.planning.options import PlanOptions
from penstock.planning.problem import pose
from penstock.schedule import one_to_one, v_shape


def family(num_ranks: int, seed: int) -> tuple[ps.Costs, ps.Links]:
    """Uneven stages and one slow link."""
    draw = np.random.default_rng(seed)
    f, i, w = (draw.uniform(*ends, num_ranks).tolist() for ends in ((90, 110), (90, 130), (70, 110)))
    costs = ps.Costs(f, i, w)
    rank = int(draw.integers(num_ranks - 1))
    return costs, ps.Links({(rank, rank + 1): float(draw.uniform(100, 300))})


def peaks(schedule: ps.Schedule) -> list[int]:
    """Most F - W (or F - B) on each rank."""
    found = []
    for row in schedule.order:
        held = peak = 0
        for op in row:
            held += {"F": 1, "W": -1, "B": -1}.get(op.kind, 0)
            peak = max(peak, held)
        found.append(peak)
    return found


def test_the_paper_example_is_planned_at_its_bound() -> None:
    """4 stages, 12 microbatches, 10 ms ops, a link of 20 ms: 410 is reached and proved."""
    plan = ps.plan(ps.Costs.uniform(4, f=10, i=10, w=10), 4, 12, ps.Links({(0, 1): 20.0}))
    assert plan.makespan == plan.lower_bound == 410.0
    assert plan.gap == 0.0
    assert plan.how == "greedy"


@pytest.mark.parametrize("seed", range(3))
def test_a_tight_cap_is_kept_and_the_simulation_agrees(seed: int) -> None:
    costs, links = family(5, seed)
    plan = ps.plan(costs, 5, 12, links, max_in_flight=5, time_limit=30.0, stop_at_gap=0.079, seed=seed)
    assert max(peaks(plan.schedule)) <= 5
    assert plan.schedule.max_in_flight == 5
    assert ps.simulate(plan.schedule, costs, links=links).makespan == pytest.approx(plan.makespan)
    assert plan.makespan >= plan.lower_bound * (1 - 1e-12)
    assert plan.gap < 0.08


def test_bytes_freed_partly_at_the_input_half() -> None:
    costs, links = family(4, 1)
    costs = ps.Costs(costs.f, costs.i, costs.w, activation=[4e9, 3e9, 2e9, 1e9], freed_by_input=0.4)
    plan = ps.plan(costs, 4, 10, links, memory_limit=1e10, time_limit=0.3)
    timeline = ps.simulate(plan.schedule, costs, links=links)
    assert max(timeline.peak_activations) <= 1e10 * (1 + 1e-9)
    assert timeline.makespan >= plan.lower_bound * (1 - 1e-12)


def test_caps_may_differ_from_rank_to_rank() -> None:
    costs, links = family(4, 2)
    plan = ps.plan(costs, 4, 10, links, max_in_flight=[4, 3, 2, 1], time_limit=0.2)
    assert all(peak <= cap for peak, cap in zip(peaks(plan.schedule), [4, 3, 2, 1], strict=True))


@pytest.mark.parametrize(
    ("placement", "num_ranks"),
    [
        (v_shape(3), 3),
        (ps.Placement(((0, 1, 2, 0, 1, 2),)), 3),
        (ps.Placement(((0, 1, 2, 3), (3, 2, 1, 0))), 4),
        (ps.Placement(((0, 1, 1, 0), (1, 0, 0, 1))), 2),
    ],
    ids=["v", "circular", "bidirectional", "two v"],
)
@pytest.mark.parametrize("cap", [math.inf, 4.0, 3.0])
def test_any_placement(placement: ps.Placement, num_ranks: int, cap: float) -> None:
    costs = ps.Costs(
        [3, 4, 3, 5, 4, 3][: placement.num_stages], [5] * placement.num_stages, [2] * placement.num_stages
    )
    plan = ps.plan(costs, num_ranks, 7, max_in_flight=cap, placement=placement, time_limit=0.1)
    assert max(peaks(plan.schedule)) <= cap
    assert plan.schedule.placement == placement
    assert plan.makespan >= plan.lower_bound * (1 - 1e-12)


def test_bounds_from_the_weakest_to_the_strongest() -> None:
    for seed in range(20):
        costs, links = family(4, seed)
        problem = pose(costs, one_to_one(4), 4, 9, links, [(1.0, 0.0)] * 4, [4.0] * 4, split=True)
        busy = busy_bound(problem)
        jackson = jackson_bound(problem)
        assert jackson >= busy * (1 - 1e-12)
        assert work_bound(problem) >= jackson * (1 - 1e-12)


def test_progress_is_told_and_what_it_raises_is_not_swallowed() -> None:
    seen: list[Any] = []
    costs, links = family(4, 0)
    ps.plan(costs, 4, 12, links, max_in_flight=4, time_limit=0.3, progress=seen.append)
    assert seen
    assert seen[0].how == "greedy"
    assert all(later.value <= earlier.value for earlier, later in itertools.pairwise(seen))


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("placement", ["one-to-one", "one-to-one+bidirectional"])
def test_an_interrupt_returns_the_best_so_far(placement: str, at_first: bool) -> None:
    """At the first order it left the planner; with several deals of microbatches the search of the next one began."""
    costs, links = family(6, 0)
    seen: list[str] = []

    def interrupt(progress: Any) -> None:
        seen.append(progress.how)
        if at_first or progress.how != "greedy":
            raise KeyboardInterrupt

    plan = ps.plan(costs, 6, 24, links, max_in_flight=6, time_limit=600.0, progress=interrupt, placement=placement)
    ps.check(plan.schedule)
    assert at_first == (len(seen) == 1)
    assert len(seen) <= 2


def test_an_interrupt_ends_the_search_of_forms_too() -> None:
    """The search within one form took the interrupt for itself, and the walk over all forms went on."""
    costs = replace(ps.Costs.uniform(4, f=10, i=10, w=10), kept_by_recompute=0.05)
    seen: list[str] = []

    def interrupt(progress: Any) -> None:
        seen.append(progress.how)
        raise KeyboardInterrupt

    ps.check(ps.plan(costs, 4, 12, memory_limit=1.5, time_limit=600.0, progress=interrupt).schedule)
    assert len(seen) == 1


UNLIKE = ps.Costs([10, 13, 9, 11], [11, 12, 8, 10], [9, 8, 10, 7])


@pytest.mark.parametrize("channels", ["buffered", "nccl"])
def test_an_interrupt_ended_one_of_several_searches_and_the_others_went_on(channels: str) -> None:
    """Microbatches that differ are planned as if they were alike first, a channel as if it were none."""
    is_buffered = channels == "buffered"
    costs = replace(UNLIKE, uneven=[1 + 0.1 * (m % 5) for m in range(16)] if is_buffered else ())
    seen: list[str] = []

    def interrupt(progress: Any) -> None:
        seen.append(progress.how)
        raise KeyboardInterrupt

    limits = {"max_in_flight": 3, "time_limit": 30.0, "stop_at_gap": 0.0}
    plan = ps.plan(costs, 4, 16, ps.Links({(0, 1): 27.0}), progress=interrupt, channels=channels, **limits)
    ps.check(plan.schedule, channels=None if is_buffered else channels)
    assert plan.gap > 0
    assert plan.seconds < 10.0
    assert len(seen) == 1


def test_a_total_limit_was_refused_as_a_time_limit_of_0_once_time_was_over() -> None:
    sizes = {"weight_bytes": [1.0] * 4, "gradient_bytes": [1.0] * 4, "optimizer_bytes": [1.0] * 4}
    costs = replace(UNLIKE, activation=[1e6] * 4, message_bytes=[3e5] * 4, **sizes)
    plan = ps.plan(costs, 4, 16, ps.Links({(0, 1): 27.0}), total_limit=4e6, time_limit=1e-3)
    assert max(ps.footprint(plan.schedule, costs, ps.Links({(0, 1): 27.0})).totals) <= 4e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_in_flight": 0.5}, "rank 0 holds 1 activations for one microbatch"),
        ({"max_in_flight": 0}, "max_in_flight of rank 0 is 0"),
        ({"max_in_flight": math.nan}, "max_in_flight of rank 0 is nan"),
        ({"max_in_flight": [4, 4]}, "max_in_flight has 2 entries"),
        ({"memory_limit": -1.0}, "memory_limit of rank 0 is -1.0"),
        ({"memory_limit": 0.5}, "rank 0 holds 1 of memory for one microbatch"),
        (
            {"max_in_flight": 4, "memory_limit": 4.0},
            "max_in_flight 4 and memory_limit 4.0 both limit memory; give one",
        ),
        (
            {"total_limit": 9.0, "memory_limit": 4.0},
            "total_limit 9.0 and memory_limit 4.0 both limit memory; give one",
        ),
        ({"time_limit": 0}, "time_limit is 0"),
        ({"time_limit": math.nan}, "time_limit is nan"),
        ({"objective": "cost"}, "objective is 'cost'"),
        ({"dispatch": "eager"}, "dispatch 'eager'"),
        ({"stop_at_gap": -1}, "stop_at_gap is -1"),
        ({"num_ranks": 3}, "the costs are for 4 stages"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"links": ps.Links({(0, 9): 1.0})}, "link 0:9"),
        ({"placement": v_shape(4)}, "the placement for 8"),
        ({"placement": ps.Placement(((0, 1, 2, 4),))}, "places a stage on rank 4"),
    ],
    ids=str,
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"costs": ps.Costs.uniform(4), "num_ranks": 4, "num_microbatches": 8, **change}
    with pytest.raises((ps.ScheduleError, ps.CostError), match=message.replace("(", r"\(")):
        ps.plan(**given)


def test_the_span_of_a_zero_bubble_schedule_is_found() -> None:
    """F = I = W and room for 2p - 1: no bubble inside any rank's span."""
    plan = ps.plan(ps.Costs.uniform(4, f=10, i=10, w=10), 4, 12, max_in_flight=7, objective="span", time_limit=5.0)
    assert plan.value == plan.lower_bound == 12 * 30
    assert ps.simulate(plan.schedule, ps.Costs.uniform(4, f=10, i=10, w=10)).span == 360


@pytest.mark.parametrize("uneven", [(), ps.cost.Uneven.lengths([3.0, *[1.0] * 11])])
def test_a_plan_for_hinted_dispatch_says_what_is_held_in_the_unit_of_the_costs(uneven: Any) -> None:
    costs = replace(ps.Costs.uniform(4, f=10, i=10, w=10), activation=[2e9] * 4, uneven=uneven)
    plan = ps.plan(costs, 4, 12, max_in_flight=4, dispatch="hinted", time_limit=0.3)
    ran = ps.simulate(plan.timeline.executed(), costs)
    assert plan.timeline.peak_activations == ran.peak_activations
    assert max(ran.peak_activations) >= 4e9


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_plan_for_dynamic_dispatch_is_measured_so(objective: str) -> None:
    costs, links = family(4, 6)
    plan = ps.plan(costs, 4, 10, links, max_in_flight=4, dispatch="dynamic", objective=objective, time_limit=0.3)
    held = ps.Costs(costs.f, costs.i, costs.w, freed_by_input=0.0)
    timeline = ps.simulate(plan.schedule, held, links=links, dispatch="dynamic", memory_limit=4)
    assert getattr(timeline, objective) == pytest.approx(plan.value)
    assert timeline.makespan == plan.makespan
    assert plan.value >= plan.lower_bound


def test_ops_and_links_that_take_no_time() -> None:
    plan = ps.plan(ps.Costs([0, 1, 0], [1, 0, 0], [0, 0, 1]), 3, 6, max_in_flight=2, time_limit=0.2)
    assert plan.makespan >= plan.lower_bound
    assert ps.plan(ps.Costs.uniform(2, f=0, i=0, w=0), 2, 3).makespan == 0


def test_one_rank_one_microbatch() -> None:
    plan = ps.plan(ps.Costs([3], [4], [5]), 1, 1)
    assert (plan.makespan, plan.lower_bound, plan.gap) == (12, 12, 0)


@pytest.mark.parametrize(("name", "cap"), [("zb-v", 8), ("v-half", 6), ("v-min", 4)])
def test_no_worse_than_the_library_on_the_same_placement(name: str, cap: int) -> None:
    costs = ps.Costs.uniform(8, f=5, i=5, w=5)
    library = ps.simulate(ps.build(name, 4, 12), costs).makespan
    for seconds in (0.2, 2.0, 60.0):  # the first is enough but on a busy machine
        plan = ps.plan(costs, 4, 12, max_in_flight=cap, placement=v_shape(4), time_limit=seconds)
        if plan.makespan <= library:
            break
    assert plan.makespan <= library


def test_the_options_of_a_plan_stand_in_its_signature() -> None:
    """They are typed as keywords and kept as one value: the two name the same."""
    named = [each.name for each in inspect.signature(ps.plan).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert sorted(named) == sorted(PlanOptions.__annotations__)
    with pytest.raises(ps.ScheduleError, match="did you mean max_in_flight="):
        ps.plan(ps.Costs.uniform(2), 2, 2, max_in_fligth=3)  # type: ignore[call-arg]
