"""Microbatches that cost more or less than others."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps

COSTS = ps.Costs.uniform(2, 10, 10, 10)


def test_ops_take_their_microbatch_s_factor() -> None:
    schedule = ps.build("gpipe", 2, 3)
    timeline = ps.simulate(schedule, replace(COSTS, uneven=(1.0, 2.5)))
    lengths = {timed.op: timed.end - timed.start for timed in timeline.ops}
    assert lengths[ps.Op("F", 0, 0)] == 10
    assert lengths[ps.Op("F", 1, 1)] == 25
    assert lengths[ps.Op("B", 0, 1)] == 50
    assert lengths[ps.Op("B", 0, 2)] == 20


def test_emulated_ops_do_too() -> None:
    costs = replace(COSTS, uneven=(1.0, 3.0, 0.5))
    run = ps.emulate(ps.build("1f1b", 2, 3), costs)
    assert run.simulated[0].makespan == ps.simulate(ps.build("1f1b", 2, 3), costs).makespan
    lengths = {timed.op: timed.end - timed.start for timed in run.timelines[0].ops}
    assert lengths[ps.Op("F", 0, 1)] > lengths[ps.Op("F", 0, 2)] + 15


@pytest.mark.parametrize(
    ("uneven", "said"),
    [
        ((1.0, -1.0), "microbatch 1 is -1"),
        ((float("nan"),), "microbatch 0 is nan"),
        ("ab", "one number a microbatch"),
    ],
)
def test_factors_that_make_no_sense(uneven: object, said: str) -> None:
    with pytest.raises(ps.CostError, match=said):
        replace(COSTS, uneven=uneven)


def test_plans_are_for_even_microbatches() -> None:
    with pytest.raises(ps.CostError, match="cost alike"):
        ps.plan(replace(COSTS, uneven=(2.0,)), 2, 3, time_limit=0.1)
    assert ps.plan(replace(COSTS, uneven=(1.0, 1.0)), 2, 3, time_limit=0.1).makespan > 0
