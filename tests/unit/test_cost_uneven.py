"""Microbatches that cost more or less than others: in time, in what is kept, in what is sent."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, replace

import pytest

import penstock as ps
from penstock.control import Configuration, Job
from penstock.control.configuration import job_from_json, job_to_json
from penstock.dispatch import Dispatch
from penstock.formats.costs import costs_from_json, costs_to_json
from penstock.passes import recompute, separate_gradients
from penstock.planning import search_space

COSTS = ps.Costs.uniform(2, 10, 10, 10)
BY_KIND = {
    "time": {"F": [1, 2], "I": [[1, 3], [2, 1]], "W": [1, 0.5]},
    "activation": [[1, 4], [2, 1]],
    "message": {"F": [1, 2], "B": [[3, 1], [1, 1]]},
}
SENDING = replace(COSTS, message_bytes=[8, 0], uneven=BY_KIND)


def lengths_of(timeline: ps.Timeline) -> dict[ps.Op, float]:
    return {timed.op: timed.end - timed.start for timed in timeline.ops}


def test_ops_take_their_microbatch_s_factor() -> None:
    lengths = lengths_of(ps.simulate(ps.build("gpipe", 2, 3), replace(COSTS, uneven=(1.0, 2.5))))
    assert lengths[ps.Op("F", 0, 0)] == 10
    assert lengths[ps.Op("F", 1, 1)] == 25
    assert lengths[ps.Op("B", 0, 1)] == 50
    assert lengths[ps.Op("B", 0, 2)] == 20


@pytest.mark.parametrize("name", ["gpipe", "zb"])
def test_factors_by_kind_and_stage(name: str) -> None:
    timeline = ps.simulate(ps.build(name, 2, 2), SENDING)
    found = lengths_of(timeline)
    assert (found[ps.Op("F", 1, 1)], found[ps.Op("F", 1, 0)]) == (20, 10)
    if name == "gpipe":  # a full backward takes what its halves take
        assert [found[ps.Op("B", 0, m)] for m in range(2)] == [20, 35]
    else:
        assert [found[ps.Op("I", s, m)] for s in range(2) for m in range(2)] == [10, 30, 20, 10]
    assert found == pytest.approx({op: SENDING.duration(*op) for op in found})


def test_a_backward_with_its_own_time_keeps_it() -> None:
    given = replace(COSTS, b=[16, 16], uneven={"time": {"B": [1, 2], "I": [9, 9]}})
    assert [given.duration("B", 0, m) for m in range(3)] == [16, 32, 16]
    halves = replace(COSTS, b=[16, 16], uneven={"time": {"I": [3, 1]}})
    assert [halves.duration("B", 0, m) for m in range(2)] == [32, 16]
    assert halves.duration("B", 0) == 16


def test_kinds_that_run_forwards_again_or_are_registered() -> None:
    given = replace(COSTS, other={"GATHER": (2.0, 3.0)}, uneven={"time": {"F": [1, 2]}})
    assert (given.duration("R", 0, 1), given.duration("I", 0, 1), given.duration("GATHER", 0, 1)) == (20, 10, 2)
    named = replace(given, uneven={"time": {"": [5, 5], "GATHER": [1, 4]}, "activation": {"GATHER": [1, 2]}})
    assert (named.duration("R", 0, 1), named.duration("GATHER", 0, 1), named.memory_change("GATHER", 0, 1)) == (
        50,
        8,
        6,
    )
    assert named.memory_change("F", 0, 1) == 1


def test_what_is_held_is_that_of_each_microbatch() -> None:
    timeline = ps.simulate(ps.build("gpipe", 2, 2), SENDING)
    assert timeline.peak_activations == (5.0, 3.0)
    again = replace(COSTS, kept_by_recompute=0.25, uneven={"activation": [1, 4]})
    schedule = recompute(ps.build("gpipe", 2, 2), again, memory_limit=4.5)
    assert ps.Op("R", 0, 1) in schedule.order[0]  # running F0 again would have both whole at once
    peaks = ps.simulate(schedule, again).peak_activations
    assert max(peaks) <= 4.5
    with pytest.raises(ps.ScheduleError, match="limit is 3"):
        recompute(ps.build("gpipe", 2, 2), again, memory_limit=3)


def test_caps_count_what_is_really_held() -> None:
    given = replace(COSTS, uneven={"activation": [1, 4]})
    schedule = ps.build("gpipe", 2, 2)
    with pytest.raises(ps.ScheduleError, match="needs 5"):
        ps.simulate(schedule, given, dispatch="hinted", memory_limit=2)
    assert ps.simulate(schedule, given, dispatch="hinted", memory_limit=5).peak_activations[0] == 5


def test_messages_weigh_what_they_are_of() -> None:
    links = ps.Links.parse("0:1=bandwidth:1KB/s")
    timeline = ps.simulate(ps.build("gpipe", 2, 2), SENDING, links=links)
    took = {message.source: message.arrived - message.sent for message in timeline.messages}
    assert took[ps.Op("F", 0, 0)] == pytest.approx(8)
    assert took[ps.Op("F", 0, 1)] == pytest.approx(16)
    gradients = sorted(ms for op, ms in took.items() if op.kind == "B")
    assert gradients == pytest.approx([17, 24])  # the light one waits behind the heavy one
    weights = replace(SENDING, weight_bytes=[1, 1])
    assert max(each.messages for each in ps.footprint(ps.build("gpipe", 2, 2), weights, links=links).ranks) == 32


def test_emulated_ops_and_messages_do_too() -> None:
    costs = replace(COSTS, message_bytes=[8, 0], uneven={"time": (1.0, 3.0, 0.5), "message": (1, 2, 1)})
    run = ps.emulate(ps.build("1f1b", 2, 3), costs)
    assert run.simulated[0].makespan == ps.simulate(ps.build("1f1b", 2, 3), costs).makespan
    lengths = lengths_of(run.timelines[0])
    assert lengths[ps.Op("F", 0, 1)] > lengths[ps.Op("F", 0, 2)] + 15


def test_lengths_scale_all_three_and_are_1_in_the_mean() -> None:
    uneven = ps.cost.Uneven.lengths([512, 1536])
    assert uneven == ps.cost.Uneven([0.5, 1.5], [0.5, 1.5], [0.5, 1.5])
    costs = replace(COSTS, message_bytes=[8, 0], uneven=uneven)
    assert costs.duration("W", 1, 1) == 15
    assert costs.memory_change("F", 0, 0) == 0.5
    assert costs.message_size(("F", 0, 1), ("F", 1, 1)) == 12


def test_costs_of_single_ops_are_their_mean_and_what_differs_from_it() -> None:
    costs = ps.Costs.by_microbatch(f=[[10, 20], 15], i=[10, 10], w=[10, 10], activation=[[1, 3], [2, 2]])
    assert (costs.f, costs.i, costs.activation) == ((15, 15), (10, 10), (2, 2))
    assert [costs.duration("F", s, m) for s in range(2) for m in range(3)] == pytest.approx([10, 20, 15, 15, 15, 15])
    assert [costs.memory_change("F", 0, m) for m in range(2)] == [1, 3]
    with pytest.raises(ps.CostError, match="f of stage 1 has 1 entries; give one per microbatch, 2 in all"):
        ps.Costs.by_microbatch(f=[[1, 2], [1]], i=[1, 1], w=[1, 1])
    with pytest.raises(ps.CostError, match="leave `uneven` out"):
        ps.Costs.by_microbatch(f=[[1, 2]], i=[1], w=[1], uneven=[1, 2])


def test_factors_of_1_say_nothing() -> None:
    assert replace(COSTS, uneven=[1, 1.0]) == COSTS
    assert replace(COSTS, uneven={"time": {"F": [1, 1]}, "activation": [[1], [1]]}) == COSTS
    assert "uneven" not in repr(COSTS)
    kept = replace(COSTS, uneven={"time": {"": [2], "W": [1]}})
    assert (kept.duration("F", 0, 0), kept.duration("W", 0, 0)) == (20, 10)


@pytest.mark.parametrize(
    ("uneven", "said"),
    [
        ((1.0, -1.0), "microbatch 1 is -1"),
        ("ab", "one number per microbatch"),
        ({"times": [1]}, "field 'times'"),
        ({"time": {"U": [2]}}, "of 'U'"),
        ({"activation": [[1, 2], [1, 2], [1, 2]]}, "3 rows"),
        ([[1, "x"]], "one number per microbatch"),
    ],
)
def test_factors_that_make_no_sense(uneven: object, said: str) -> None:
    with pytest.raises(ps.CostError, match=said):
        replace(COSTS, uneven=uneven)


@pytest.mark.parametrize("lengths", [[], [0, 0], [1, -2], "ab", [float("inf")]])
def test_lengths_that_make_no_sense(lengths: list[float]) -> None:
    with pytest.raises(ps.CostError):
        ps.cost.Uneven.lengths(lengths)


def test_files_hold_them() -> None:
    for uneven in ([1, 2.5], BY_KIND, {"time": {"": [2], "W": [1]}}, {"activation": [[1, 2], [3, 4]]}):
        costs = replace(COSTS, uneven=uneven)
        assert costs_from_json(costs_to_json(costs), 2) == costs
    text = '{"f": [[10, 20], 10], "i": 10, "w": 10, "activation": [[1, 3], 2]}'
    assert costs_from_json(text, 2) == ps.Costs.by_microbatch(
        f=[[10, 20], 10], i=[10, 10], w=[10, 10], activation=[[1, 3], 2]
    )
    for wrong in ('{"f": [[10, "x"], 10], "i": 10, "w": 10}', '{"f": 1, "i": 1, "w": 1, "uneven": 3}'):
        with pytest.raises(ps.CostError):
            costs_from_json(wrong, 2)
    with pytest.raises(ps.CostError, match="give one number per stage"):
        costs_from_json('{"f": 1, "i": 1, "w": 1, "weight_bytes": [[1], [2]]}', 2)


def test_records_of_jobs_hold_them() -> None:
    job = Job(SENDING, Configuration(ps.build("1f1b", 2, 2), Dispatch.FROZEN, caps=(10.0, 10.0)))
    assert job_from_json(json.loads(json.dumps(job_to_json(job)))).costs == SENDING
    assert ps.Costs(**asdict(SENDING)) == SENDING


def test_passes_time_and_hold_each_microbatch_as_it_is() -> None:
    given = replace(ps.Costs.uniform(3, 10, 10, 10), uneven={"time": [1, 4, 1, 1], "activation": [1, 4, 1, 1]})
    whole = ps.build("1f1b", 3, 4)
    before, peaks = ps.simulate(whole, given).makespan, ps.simulate(whole, given).peak_activations
    apart = separate_gradients(whole, given, memory_limit=peaks)
    after = ps.simulate(apart, given)
    assert after.makespan <= before
    assert all(held <= peak + 1e-9 for held, peak in zip(after.peak_activations, peaks, strict=True))


def test_what_is_made_before_sizes_are_known_is_refused() -> None:
    given = replace(COSTS, uneven={"activation": [1, 2]})
    with pytest.raises(ps.CostError, match="cost the same"):
        search_space(given, 2, 2)
    program = ps.Program(ps.placements.one_to_one(2), 2, ps.Rules("backward-first", memory_limit=4), costs=given)
    with pytest.raises(ps.CostError, match="all keep the same"):
        program.build()
    assert ps.Program(ps.placements.one_to_one(2), 2, costs=given).build().num_ops == 8


def test_what_is_held_is_that_of_the_timeline() -> None:
    """Peaks are those of going through the ops by hand."""
    timeline = ps.simulate(ps.build("zb-v", 2, 4), replace(ps.Costs.uniform(4), uneven={"activation": [3, 1, 2, 5]}))
    held: dict[int, float] = defaultdict(float)
    size = [3.0, 1.0, 2.0, 5.0]
    share = {"F": 1.0, "I": -0.5, "W": -0.5}
    for timed in timeline.ops:
        held[timed.rank] += share[timed.op.kind] * size[timed.op.microbatch]
    assert held == pytest.approx({0: 0.0, 1: 0.0})
