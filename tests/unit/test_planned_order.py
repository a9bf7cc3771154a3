"""The order of microbatches that differ: rules, moves, caps by size, and plans that declare it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from ordered_loop import SOME_WORTH, wrong
from penstock.dispatch import Dispatch
from penstock.planning.microbatch_order import in_order, mixed, order_microbatches, split

EVEN = ps.Costs.uniform(4, 10, 10, 10)
LENGTHS = [3.0, 0.4, 1.0, 0.5, 2.0, 0.3, 1.5, 0.7, 0.9, 0.6, 4.0, 0.8]
UNEVEN = replace(EVEN, uneven=LENGTHS)
SIZED = replace(EVEN, uneven={"time": LENGTHS, "activation": LENGTHS})


def test_rules_are_permutations_with_the_longest_where_they_say() -> None:
    ascending = np.arange(6)
    assert split(ascending, 1 / 2).tolist() == [1, 3, 5, 4, 2, 0]
    assert split(ascending, 1.0).tolist() == list(range(6))
    assert split(ascending, 0.0).tolist() == list(range(6))[::-1]
    assert mixed(np.arange(8), 1 / 2).tolist() == [1, 3, 7, 4, 6, 5, 2, 0]
    for num, share in itertools.product(range(1, 9), (0, 1 / 16, 1 / 4, 1 / 3, 1 / 2, 3 / 4, 1)):
        for rule in (split, mixed):
            assert sorted(rule(np.arange(num), share).tolist()) == list(range(num))


@pytest.mark.parametrize("name", ["1f1b", "zb", "zb-v", "interleaved-1f1b", "chimera", "gpipe"])
def test_what_is_predicted_is_what_the_simulator_says(name: str) -> None:
    schedule = ps.build(name, 4, 12)
    costs = replace(ps.Costs.uniform(schedule.num_stages, 10, 10, 10), uneven=SIZED.uneven)
    links = ps.Links({(0, 1): 7.0})
    found = order_microbatches(schedule, costs, links=links)
    ps.check(found.schedule)
    run = ps.simulate(found.schedule, costs, links=links, dispatch=found.dispatch, memory_limit=found.caps)
    assert run.makespan == pytest.approx(found.makespan, rel=1e-12)
    assert found.arrival == ps.simulate(schedule, costs, links=links).makespan
    assert found.makespan <= found.arrival
    assert found.gain == found.arrival / found.makespan - 1
    assert found.arrival_peaks == ps.simulate(schedule, costs).peak_activations
    assert all(held <= cap * (1 + 1e-9) for held, cap in zip(run.peak_activations, found.arrival_peaks, strict=True))
    for k, microbatch in enumerate(found.order):
        assert schedule.microbatch_pipeline[k] == schedule.microbatch_pipeline[microbatch]
        assert in_order(schedule, np.array(found.order)).order == found.schedule.order


def test_order_is_the_gain_where_memory_is_counted_in_microbatches() -> None:
    found = order_microbatches(ps.build("1f1b", 4, 12), UNEVEN)
    assert found.rule != "arrival"
    assert found.gain > 0.2
    assert found.schedule.microbatches_of("F", 0) == found.order == found.schedule.microbatches_of("B", 3)
    moved = order_microbatches(ps.build("1f1b", 4, 12), UNEVEN, time_limit=30.0)
    assert moved.makespan <= found.makespan


def test_memory_is_held_by_size() -> None:
    """The mountain puts the long ones together, which a count does not see."""
    schedule = ps.build("1f1b", 4, 12)
    by_count = order_microbatches(schedule, UNEVEN)
    held = ps.simulate(by_count.schedule, SIZED).peak_activations
    arrival = ps.simulate(schedule, SIZED).peak_activations
    assert max(held) > max(arrival)
    by_size = order_microbatches(schedule, SIZED, memory_limit=max(arrival), time_limit=30.0)
    assert by_count.makespan < by_size.makespan < by_size.arrival
    run = ps.simulate(by_size.schedule, SIZED, dispatch=by_size.dispatch, memory_limit=max(arrival))
    assert max(run.peak_activations) <= max(arrival) * (1 + 1e-9)


def test_an_order_may_save_memory_that_arrival_lacks() -> None:
    schedule = ps.build("1f1b", 2, 6)
    costs = replace(ps.Costs.uniform(2), uneven={"activation": [5, 5, 1, 1, 1, 1]})
    with pytest.raises(ps.ScheduleError, match="needs 10"):
        ps.simulate(schedule, costs, memory_limit=6)
    found = order_microbatches(schedule, costs, memory_limit=6)
    assert found.rule != "arrival"
    assert max(ps.simulate(found.schedule, costs).peak_activations) <= 6
    with pytest.raises(ps.ScheduleError, match=r"rank 0 may hold 5, and in the lightest .* it holds 6"):
        order_microbatches(schedule, costs, memory_limit=5)


def test_a_gain_below_the_noise_changes_nothing() -> None:
    schedule = ps.build("1f1b", 4, 12)
    gain = order_microbatches(schedule, UNEVEN).gain
    for noise, rule in ((gain * 0.99, "mountain"), (gain * 1.01, "arrival")):
        found = order_microbatches(schedule, UNEVEN, noise=noise)
        assert (found.rule == "arrival") == (rule == "arrival")
    assert (found.schedule, found.dispatch, found.gain) == (schedule, Dispatch.FROZEN, 0.0)
    even = order_microbatches(schedule, EVEN)
    assert (even.rule, even.dispatch, even.schedule) == ("arrival", "frozen", schedule)


def test_messages_of_each_size_take_their_time() -> None:
    schedule = ps.build("1f1b", 4, 12)
    costs = replace(UNEVEN, message_bytes=[1000] * 4, uneven={"time": LENGTHS, "message": LENGTHS})
    links = ps.Links.parse("1:2=bandwidth:100KB/s")
    found = order_microbatches(schedule, costs, links=links)
    run = ps.simulate(found.schedule, costs, links=links, dispatch=found.dispatch, memory_limit=found.caps)
    assert run.makespan == pytest.approx(found.makespan)
    assert found.gain > 0


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        (ps.schedule.with_updates(ps.build("1f1b", 2, 4), window=4, max_mismatch=0), {}, "follows from its number"),
        (ps.schedule.declare_order(ps.build("gpipe", 2, 4), backward="reversed"), {}, "declares an order"),
        (ps.build("1f1b", 2, 4), {"noise": -1}, "noise is -1"),
        (ps.build("1f1b", 2, 4), {"time_limit": float("nan")}, "time_limit is nan"),
        (ps.build("1f1b", 2, 4), {"memory_limit": [1]}, "1 entries"),
        (ps.build("1f1b", 2, 4), {"memory_limit": -1}, "memory_limit of rank 0"),
        (ps.build("1f1b", 2, 4), {"dispatches": ()}, "no dispatches"),
        (ps.build("1f1b", 2, 4), {"dispatches": ("quick",)}, "quick"),
    ],
)
def test_what_makes_no_sense_is_refused(schedule: ps.Schedule, options: dict, said: str) -> None:
    with pytest.raises(ps.ScheduleError, match=said):
        order_microbatches(schedule, ps.Costs.uniform(2), **options)


@pytest.mark.parametrize("name", ["1f1b", "zb"])
def test_a_run_in_a_planned_order_is_the_plain_loop_in_that_order(name: str) -> None:
    """To the last bit: losses, gradients, statistics and parameters, of a batch that does not divide evenly."""
    costs = replace(ps.Costs.uniform(3, 10, 10, 10), uneven=[3, 1, 1, 4, 2, 1])
    found = order_microbatches(ps.build(name, 3, 6), costs)
    assert found.order != tuple(range(6))
    assert wrong(found.schedule, found.dispatch.value, merge=SOME_WORTH, extra=3) == []
    p = ps.plan(costs, 3, 6, time_limit=0.3, max_in_flight=3)
    assert p.microbatch_order != tuple(range(6))
    assert wrong(p.schedule, "hinted", extra=2) == []


@pytest.mark.parametrize(
    ("dispatch", "limit"), [("frozen", {}), ("hinted", {"max_in_flight": 3}), ("frozen", {"memory_limit": 6.0})]
)
def test_a_plan_declares_the_order_it_was_made_for(dispatch: str, limit: dict) -> None:
    p = ps.plan(SIZED, 4, 12, time_limit=0.4, dispatch=dispatch, **limit)
    ps.check(p.schedule)
    assert p.microbatch_order is not None
    assert sorted(p.microbatch_order) == list(range(12))
    assert tuple(p.schedule.microbatches_of("F", 2)) == p.microbatch_order
    assert p.lower_bound <= p.value == p.makespan == p.timeline.makespan
    work = sum(LENGTHS) * 30
    assert p.lower_bound >= work
    if dispatch == "frozen":
        assert ps.simulate(p.schedule, SIZED).makespan == p.makespan
    if "memory_limit" in limit:
        assert max(p.timeline.peak_activations) <= 6.0 * (1 + 1e-9)
    if "max_in_flight" in limit:
        ps.check(p.schedule, max_in_flight=3)
