"""The search over placements, rules and traversals, against formulas, the library and its own claims."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.library import ASYNCHRONOUS
from penstock.planning.bounds import least_ms
from penstock.planning.programs import Outcome, fold, placements_of, search_space

SYNCHRONOUS = [n for n in ps.library.SCHEDULES if n not in ("distmm", "mllm", *ASYNCHRONOUS)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_a_limit_every_placement_reaches_the_bubble_of_its_shape(num_ranks: int) -> None:
    p, n = num_ranks, 4 * num_ranks
    outcome = search_space(ps.Costs.uniform(4 * p), p, n)
    bubble = {found.placement: found.makespan - 12 * n for found in outcome.found}
    assert bubble["one-to-one"] == 4 * (p - 1)
    assert bubble["v-shape"] == bubble["circular"] == 2 * (p - 1)
    assert bubble["wave"] == p - 1
    assert bubble["one-to-one+bidirectional"] <= 2 * (p - 2)
    assert outcome.best.makespan == min(found.makespan for found in outcome.found)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_is_found_is_at_least_as_good_as_the_library_in_its_placement_and_memory(name: str) -> None:
    p, n = 4, 16
    options = {"num_stages": 2 * p} if name in ("interleaved-1f1b", "looped-bfs") else {}
    named = ps.build(name, p, n, **options)
    parts = ps.Costs.uniform(4 * p)
    shape = next(k for k, v in placements_of(p, 4 * p).items() if v == named.placement)
    timeline = ps.simulate(named, fold(parts, named.num_stages))
    limit = max(timeline.peak_activations)
    best = search_space(parts, p, n, memory_limit=limit, shapes=[shape]).best
    assert best.makespan <= timeline.makespan
    program = best.program
    again = ps.simulate(best.schedule, program.all_costs)
    assert again.makespan == pytest.approx(best.makespan)
    assert max(again.peak_activations) <= limit + 1e-9


def test_shared_ends_are_laid_on_all_ranks() -> None:
    costs = ps.Costs([5, 1, 1, 1, 1, 5], [5, 1, 1, 1, 1, 5], [1] * 6)
    outcome = search_space(costs, 2, 4, shared_ends=True)
    assert all(found.schedule.placement.shared for found in outcome.found)
    ps.check(outcome.best.schedule)


@pytest.mark.parametrize(
    ("parts", "changes", "error", "message"),
    [
        (6, {}, ps.CostError, "6 parts, which do not divide among 4 ranks"),
        (8, {"shapes": ["spiral"]}, ps.ScheduleError, "no placement is named 'spiral': choose among one-to-one"),
        (8, {"shapes": ["wave"]}, ps.ScheduleError, "wave has 4 stages per rank, .* give a multiple of 16 parts"),
        (8, {"memory_limit": 4, "total_limit": 4}, ps.ScheduleError, "both limit memory"),
        (8, {"total_limit": 4}, ps.CostError, "do not say what weights take"),
        (8, {"memory_limit": [1, 2, 3]}, ps.ScheduleError, "memory_limit has 3 entries"),
        (8, {"memory_limit": 0.5}, ps.ScheduleError, "a memory of 0.5: one-to-one: one microbatch takes 2 on rank 0"),
    ],
)
def test_refusals(parts: int, changes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        search_space(ps.Costs.uniform(parts), 4, 8, **changes)


def test_bug_times_of_own_ops_were_dropped() -> None:
    """The programs of a search have no such ops, and neither has a plan with one placement, which refuses them."""
    costs = replace(ps.Costs.uniform(8), other={"EXCHANGE": 5.0})
    for given in (costs, lambda num_stages: fold(costs, num_stages)):
        with pytest.raises(ps.CostError, match="times of EXCHANGE, and the plan would have no such ops"):
            search_space(given, 2, 4)
    assert search_space(replace(costs, other={"U": 5.0}), 2, 4).found


def test_costs_fold_into_stages_by_adding_up() -> None:
    costs = ps.Costs([1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 2, 2], activation=[1, 1, 5, 5])
    folded = fold(costs, 2)
    assert (folded.f, folded.i, folded.w, folded.activation) == ((3, 7), (7, 3), (2, 4), (2, 10))
    state = ps.Costs(
        [1] * 4, [1] * 4, [1] * 4, update_bytes=[1, 2, 3, 4], other={("U", 3): 2.0, ("U", 2): 1.0, "V": 5}
    )
    pairs = fold(state, 2)
    assert (pairs.update_bytes, pairs.weight_bytes) == ((3, 7), ())
    assert [pairs.duration(kind, stage) for kind in "UV" for stage in (0, 1)] == [0, 3, 5, 5]
    ends = fold(ps.Costs.uniform(6), 4, shared_ends=True)
    assert ends.f == (1, 2, 2, 1)
    with pytest.raises(ps.CostError, match="do not fold into 3 stages"):
        fold(costs, 3)


def test_folded_costs_keep_what_updates_cost() -> None:
    parts = ps.Costs(
        [1.0] * 4, [1.0] * 4, [1.0] * 4, other={"U": 0.5, ("U", 3): 2.0}, update_bytes=[1.0, 2.0, 3.0, 4.0],
        take_over=[0.1, 0.2, 0.3, 0.4],
    )  # fmt: skip
    folded = fold(parts, 2)
    assert [folded.duration("U", stage) for stage in (0, 1)] == [1.0, 2.5]
    assert [folded.duration("U", stage, owns=False) for stage in (0, 1)] == pytest.approx([0.3, 0.7])
    assert folded.message_size(("B", 1), ("U", 1)) == 7.0
    ends = fold(parts, 3, shared_ends=True)
    assert [ends.duration("U", stage) for stage in range(3)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("shared_ends", [False, True])
def test_those_kept_are_the_best_of_all_points(shared_ends: bool) -> None:
    """Against every point of a space of one's own, run on its own; a bound leaves out what is not below it."""
    num = 6 if shared_ends else 4
    costs = ps.Costs(f=[2, 3, 1, 5, 4, 2][:num], i=[3, 1, 2, 4, 2, 6][:num], w=[1, 2, 3, 2, 4, 1][:num])

    def rules(name: str, placement: ps.Placement, num_microbatches: int) -> list[ps.Rules]:
        assert num_microbatches == 6
        return [ps.Rules(kinds, max_in_flight=most) for kinds in ("backward-first", "interleaved") for most in (4, 9)]

    def search(**more: Any) -> Outcome:
        ends = {"shared_ends": True, "split": lambda stage: 0 < stage < 3} if shared_ends else {}
        return search_space(costs, 2, 6, rules=rules, **ends, **more)

    every = search(keep=99)
    assert every.num_tried == 4 * len({found.placement for found in every.found})
    for found in every.found:
        alone = ps.simulate(found.program.build(), found.program.all_costs)
        assert found.makespan == alone.makespan
    for keep in (1, 2):
        for name in {found.placement for found in every.found}:
            of_one = [found.makespan for found in every.found if found.placement == name]
            assert [found.makespan for found in search(keep=keep).found if found.placement == name] == of_one[:keep]
    bound = every.found[len(every.found) // 2].makespan
    below = search(keep=99, below=bound)
    assert [f.makespan for f in below.found] == [f.makespan for f in every.found if f.makespan < bound]
    assert search(below=every.best.makespan).found == ()
    assert search(below=1.0).num_tried == 0, "no rank does its work in a millisecond"


@pytest.mark.parametrize("seed", range(20))
def test_no_program_beats_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    costs = ps.Costs(*([draw.randint(1, 9) for _ in range(8)] for _ in "fiw"))
    for found in search_space(costs, 2, draw.randint(1, 7)).found:
        assert least_ms(found.program) <= found.makespan + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_found_within_bytes_holds_no_more(seed: int) -> None:
    draw = random.Random(seed)
    rows = ("f", "i", "w", "activation", "message_bytes", "weight_bytes", "optimizer_bytes")
    costs = ps.Costs(**{row: [draw.randint(1, 9) for _ in range(8)] for row in rows})
    links = ps.Links({(0, 1): draw.choice([0.0, 7.5])})
    alone = search_space(costs, 2, 6, links=links, shapes=["one-to-one"]).best.footprint.totals
    limit = [total * draw.uniform(0.8, 1.2) for total in alone]
    outcome = search_space(costs, 2, 6, links=links, total_limit=limit, keep=3)
    names = [found.name for found in outcome.found]
    assert len(set(names)) == len(names)
    assert {found.placement for found in outcome.found}.isdisjoint(dict(outcome.left_out))
    for found in outcome.found:
        held = ps.footprint(found.schedule, fold(costs, found.program.num_stages), links)
        assert all(each <= most for each, most in zip(held.totals, limit, strict=True))
        assert ps.simulate(found.schedule, found.program.all_costs, links=links).makespan == pytest.approx(
            found.makespan
        )


def test_programs_that_differ_have_names_that_differ() -> None:
    """Regression: with and without warm-up counts, and under other caps of stages, names were alike."""
    for limit in (None, 8.0):
        outcome = search_space(ps.Costs.uniform(16), 4, 8, memory_limit=limit, keep=99)
        names = [found.name for found in outcome.found]
        assert len(set(names)) == len(names) > len({found.placement for found in outcome.found})

    def alike(name: str, placement: ps.Placement, num_microbatches: int) -> list[ps.Rules]:
        pairs = ps.Rules("interleaved", units=(2, 2), strict=True)
        return [ps.Rules("interleaved", strict=True), pairs, ps.Rules(max_in_flight=1), ps.Rules(warmup=[6, 1])]

    costs = ps.Costs([3, 1], [2, 5], [1, 4])
    outcome = search_space(costs, 2, 8, rules=alike, shapes=["one-to-one"], keep=9)
    endings = [found.name.split("B breadth-first")[1] for found in outcome.found]
    assert endings == [", warm-up 6,1", "", " (no. 2)", ", in flight 1"]


def test_rules_of_ones_own_are_asked_for_once_a_placement() -> None:
    asked = []

    def rules(name: str, placement: ps.Placement, num_microbatches: int) -> list[ps.Rules]:
        asked.append(name)
        return [ps.Rules()]

    search_space(ps.Costs.uniform(4), 2, 4, rules=rules, shapes=["one-to-one", "v-shape"])
    assert asked == ["one-to-one", "v-shape"]


def test_rules_under_which_no_rank_can_go_on_are_told() -> None:
    """Regression: where there is no limit of memory, the message could not be made."""

    def stuck(name: str, placement: ps.Placement, num_microbatches: int) -> list[ps.Rules]:
        return [ps.Rules(max_in_flight=0)]

    costs = ps.Costs.uniform(4)
    with pytest.raises(ps.ScheduleError, match=r"can run: one-to-one: under each of the rules some rank can't go on"):
        search_space(costs, 2, 4, rules=stuck)
    assert search_space(costs, 2, 4, shapes=[]) == search_space(costs, 2, 4), "no names are all of them"


def test_a_model_of_too_few_layers_is_laid_where_it_can_be() -> None:
    def model(num_stages: int) -> ps.Costs:
        return ps.cost.costs_preset("gpt2-7b", num_stages=num_stages)

    assert {name for name, _ in search_space(model, 8, 4).left_out} == {"wave", "wave+bidirectional"}
    for ranks, shapes in ((32, None), (8, ["wave"])):
        with pytest.raises(ps.CostError, match="it has 24 layers"):
            search_space(model, ranks, 4, shapes=shapes)
