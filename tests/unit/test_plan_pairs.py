"""`ps.plan` with pairs: its bound holds for every schedule with pairs, and it uses them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.cost.overlap import Overlap
from penstock.passes import overlap_pairs, separate_pairs
from penstock.passes.overlap import _neighbours, joinable_pairs, weigh_pairs
from penstock.planning import paired, strategy
from penstock.planning.options import PlanRequest
from penstock.planning.paired import busy_bound, plan_pairs, relaxed_costs
from penstock.schedule import Op, Pair, Schedule, ScheduleError
from penstock.schedule.dependencies import predecessors
from penstock.schedule.liveness import run_on, run_untimed

pytestmark = pytest.mark.unit


def even(num_stages: int, hidden: float = 0.9) -> ps.Costs:
    row = [10.0] * num_stages
    overlap = Overlap(f=[5.0] * num_stages, b=[9.0] * num_stages, hidden=hidden)
    return ps.Costs(f=row, i=row, w=row, overlap=overlap)


def drawn(num_stages: int, seed: int) -> ps.Costs:
    draw = random.Random(seed)
    f, i, w = ([float(draw.randint(1, 9)) for _ in range(num_stages)] for _ in range(3))
    b = [x + y for x, y in zip(i, w)]
    overlap = Overlap(
        f=[draw.random() * x for x in f], b=[draw.random() * x for x in b], hidden=draw.random(),
        measured={(0, num_stages - 1): draw.uniform(0.5, 1.0) * (f[0] + b[-1])} if draw.random() < 0.5 else (),
    )  # fmt: skip
    return ps.Costs(f=f, i=i, w=w, b=b, overlap=overlap)


def rows(num: int, stage: int) -> list[list[Op]]:
    """Every order of a rank's forwards and whole backwards."""
    found = []
    for places in itertools.combinations(range(2 * num), num):
        forward, backward, row = iter(range(num)), iter(range(num)), []
        for k in range(2 * num):
            row.append(Op("F", stage, next(forward)) if k in places else Op("B", stage, next(backward)))
        if all(row.index(Op("F", stage, m)) < row.index(Op("B", stage, m)) for m in range(num)):
            found.append(row)
    return found


def every_schedule(num_ranks: int, num: int) -> Iterator[Schedule]:
    """All orders of whole backwards with one stage per rank, each with every set of pairs that runs."""
    for order in itertools.product(*(rows(num, stage) for stage in range(num_ranks))):
        lines = [" ".join(f"{op.kind}{op.microbatch}" for op in row) for row in order]
        alone = ps.parse("\n".join(f"rank {rank} | {line}" for rank, line in enumerate(lines)))
        try:
            ps.check(alone)
        except ScheduleError:
            continue
        neighbours = [
            Pair(a, b)
            for row in alone.order
            for a, b in itertools.pairwise(row)
            if (a.kind, b.kind) == ("F", "B") and a.microbatch != b.microbatch
        ]
        for count in range(len(neighbours) + 1):
            for pairs in itertools.combinations(neighbours, count):
                try:
                    tried = replace(alone, pairs=pairs)
                    ps.check(tried)
                except ScheduleError:
                    continue
                yield tried


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_with_pairs_is_below_the_bound(seed: int) -> None:
    costs = drawn(2, seed)
    found = ps.plan(costs, 2, 3, split=False, time_limit=0.6)
    least, count = float("inf"), 0
    for schedule in every_schedule(2, 3):
        least, count = min(least, ps.simulate(schedule, costs).makespan), count + 1
    assert count == 45
    assert found.lower_bound <= least + 1e-9
    assert found.makespan >= least - 1e-9
    assert busy_bound(costs, 2, 3, ps.placements.one_to_one(2), False) <= least + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_holds_for_the_library_with_pairs(seed: int) -> None:
    costs, placement = drawn(8, seed), ps.placements.v_shape(4)
    found = ps.plan(costs, 4, 9, placement=placement, time_limit=0.6)
    paired = ps.build("dualpipe-v", 4, 9, overlap=True)
    others = [paired, separate_pairs(paired), overlap_pairs(paired, costs), overlap_pairs(ps.build("zb-v", 4, 9))]
    for schedule in others:
        assert found.lower_bound <= ps.simulate(schedule, costs).makespan + 1e-9
    assert found.makespan <= min(ps.simulate(each, costs).makespan for each in others[:3]) + 1e-9
    assert busy_bound(costs, 4, 9, placement, None) <= found.lower_bound + 1e-9


def test_pairs_are_planned_and_named() -> None:
    costs, placement = even(8), ps.placements.v_shape(4)
    found = ps.plan(costs, 4, 8, placement=placement, time_limit=0.6)
    ps.check(found.schedule)
    assert found.schedule.pairs
    assert found.how.endswith(", paired")
    assert found.certificate.pairs == "any"
    assert str(found.certificate).endswith("a forward and a backward as a pair or not")
    assert found.makespan == ps.simulate(found.schedule, costs).makespan == found.timeline.makespan
    assert found.makespan <= ps.simulate(ps.build("dualpipe-v", 4, 8, overlap=True), costs).makespan
    alone = ps.plan(replace(costs, overlap=None), 4, 8, placement=placement, time_limit=0.6)
    assert alone.certificate.pairs == "none"
    assert found.makespan < alone.lower_bound  # so that a plan without pairs can't be as good


def test_an_interrupt_ended_one_plan_and_the_others_were_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    num_searches = 0

    def interrupt(*_: Any) -> None:
        nonlocal num_searches
        num_searches += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy, "_refute", interrupt)
    ps.check(ps.plan(drawn(4, 1), 4, 8, split=False, time_limit=30.0, stop_at_gap=0.0).schedule)
    assert num_searches == 1


def test_limits_hold_with_pairs() -> None:
    costs, placement = even(8), ps.placements.v_shape(4)
    found = ps.plan(costs, 4, 8, placement=placement, max_in_flight=8, time_limit=0.6)
    ps.check(replace(found.schedule, max_in_flight=8))
    assert max(ps.simulate(ps.build("dualpipe-v", 4, 8, overlap=True), costs).peak_activations) > 8
    held = ps.plan(costs, 4, 8, placement=placement, memory_limit=6.0, time_limit=0.6)
    assert max(held.timeline.peak_activations) <= 6.0


def test_halves_are_in_no_pair() -> None:
    found = ps.plan(even(4), 4, 8, split=True, time_limit=0.6)
    assert found.schedule.pairs == ()
    assert found.certificate.pairs == "none"


class Clock:
    """A second passes whenever somebody looks at it."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks)


def test_the_time_limit_was_looked_at_after_whole_orders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with pairs took 11.9 s where 2 were allowed: pairs of an order were joined to the end, however long."""
    costs, placement = even(8), ps.placements.v_shape(4)
    given = ps.plan(relaxed_costs(costs, placement), 4, 8, placement=placement, time_limit=0.3)
    asked: list[float] = []
    joined: list[Schedule] = []

    def planned(request: PlanRequest) -> ps.Plan:
        asked.append(request.time_limit)
        return given

    def joinable(schedule: Schedule, is_over: Callable[[], bool]) -> tuple[Pair, ...]:
        joined.append(schedule)
        return joinable_pairs(schedule, is_over)

    monkeypatch.setattr(paired, "joinable_pairs", joinable)

    def planned_in(seconds: float) -> ps.Plan:
        asked.clear()
        joined.clear()
        found = plan_pairs(PlanRequest(costs, 4, 8, ps.Links(), placement, time_limit=seconds), planned, Clock())
        ps.check(found.schedule)
        assert found.makespan <= ps.simulate(given.schedule, costs).makespan
        return found

    least = planned_in(1.0)
    assert (len(asked), len(joined)) == (1, 1), "the bound's order and the library's first, and nothing else"
    monkeypatch.setattr(paired, "_MOST_AT_ONCE", 0)
    assert planned_in(1.0).makespan >= least.makespan
    assert (len(asked), len(joined)) == (1, 0), "of a long order no pairs are joined any more"
    some = planned_in(30.0)
    assert len(asked) == 3
    assert max(asked) < 0.7 * 30
    few = len(joined)
    enough = planned_in(1e6)
    assert 0 < few < len(joined)
    assert enough.schedule.pairs
    assert enough.makespan <= some.makespan


def test_joining_pairs_ends_when_it_is_asked_to() -> None:
    schedule, costs = ps.build("1f1b", 4, 16), even(4)
    whole, waiting = joinable_pairs(schedule), ps.build("gpipe", 4, 8)  # of which three pairs wait in a circle
    assert whole
    assert joinable_pairs(waiting)
    for looks in (1, 3):
        clock = Clock()
        assert joinable_pairs(waiting, lambda clock=clock, looks=looks: clock() >= looks) == ()  # type: ignore[misc]
        assert clock.looks == looks
    alone = separate_pairs(ps.build("dualpipe-v", 4, 9, overlap=True))
    pairs = joinable_pairs(alone)
    assert weigh_pairs(alone, pairs, even(8), None, lambda: True) == alone
    assert weigh_pairs(alone, pairs, even(8), None) == overlap_pairs(alone, even(8))
    assert overlap_pairs(schedule, costs).pairs == weigh_pairs(schedule, whole, costs, None).pairs


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "dualpipe-v", "chimera"])
def test_pairs_that_wait_for_one_another_are_found_as_from_the_beginning(name: str) -> None:
    """Each time one is left out, the others go on from where they stood."""
    schedule = separate_pairs(ps.build(name, 4, 8))
    present = {op: rank for rank, row in enumerate(schedule.order) for op in row}
    tried = replace(schedule, pairs=tuple(_neighbours(schedule)))
    while (run := run_untimed(tried, None)).blocked:
        assert run_on(tried, run.steps) == run
        standing = {tried.order[row][run.steps[row]]: missing for row, (missing, _, _) in run.blocked.items()}
        left_out = next(
            pair
            for pair in tried.pairs
            if pair.forward in standing
            and standing[pair.forward] not in predecessors(pair.forward, schedule.graph, present)
        )
        fewer = replace(tried, pairs=tuple(pair for pair in tried.pairs if pair != left_out))
        assert run_on(fewer, run.steps) == run_untimed(fewer, None)
        tried = fewer
    assert joinable_pairs(schedule) == tried.pairs


@pytest.mark.parametrize("options", [{"objective": "span"}, {"dispatch": "dynamic"}])
def test_what_is_not_planned_with_pairs_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ps.CostError, match="pairs are planned for the makespan of a frozen order"):
        ps.plan(even(4), 4, 8, **options)
    with pytest.raises(ps.CostError, match="uneven microbatches"):
        ps.plan(replace(even(4), uneven=[1.0, 2.0] * 4), 4, 8)


def test_with_pairs_a_given_deal_stays_as_it_is_given() -> None:
    """The library's orders deal microbatches in turn, and one of them came out for a deal of 8 and 0."""
    row = [10.0] * 4
    costs = ps.Costs(row, row, row, overlap=Overlap(f=[3.0] * 4, b=[3.0] * 4))
    plan = ps.plan(costs, 4, 8, placement="one-to-one+bidirectional", deal=[8, 0], time_limit=0.6)
    assert plan.certificate.microbatches == "as given (8, 0)"
    assert plan.schedule.microbatch_pipeline == (0,) * 8
