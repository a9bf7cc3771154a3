"""Schedules as columns: what goes through all ops of a schedule makes none, and what asks for ops gets them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.dispatch import lower
from penstock.planning.problem import pose
from penstock.planning.starts import in_step
from penstock.schedule.columns import columns_of

pytestmark = pytest.mark.unit


def test_check_lower_and_simulate_make_no_op() -> None:
    s = ps.build("zb-h1", 4, 9)
    ps.check(s)
    ps.check(s, max_in_flight=6)
    lower(s)
    timeline = ps.simulate(s, ps.Costs.uniform(4), links=ps.Links({(0, 1): 2.0}))
    assert timeline.makespan > 0
    assert timeline.busy
    assert timeline.peak_activations
    assert "order" not in vars(s)
    assert len(timeline.rows[0]) == 27  # now they are asked for
    assert "order" in vars(s)


def test_a_schedule_of_columns_is_the_schedule_of_its_ops() -> None:
    s = ps.build("zb-h1", 4, 9)
    assert all(type(op.microbatch) is int and type(op.stage) is int for row in s.order for op in row)
    plain = ps.Schedule("zb-h1", s.placement, s.order, s.microbatch_pipeline)
    assert ps.build("zb-h1", 4, 9) == plain
    assert hash(ps.build("zb-h1", 4, 9)) == hash(plain)
    assert repr(ps.build("zb-h1", 4, 9)) == repr(plain)
    assert ps.parse(str(ps.build("zb-h1", 4, 9))) == plain
    assert replace(ps.build("zb-h1", 4, 9), name="other").order == plain.order
    for made in (columns_of(plain), s.columns):
        assert made is not None
        for ours, theirs in zip(made, s.columns or (), strict=True):
            assert np.array_equal(ours, theirs)
            assert ours.dtype == np.int64


def test_what_is_no_attribute_is_an_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="Schedule has no attribute 'orders'"):
        _ = ps.build("1f1b", 3, 5).orders  # type: ignore[attr-defined]


def test_plans_with_several_pipelines_have_each_its_own_microbatches() -> None:
    placement = ps.placements.bidirectional(ps.placements.one_to_one(2))
    problem = pose(ps.Costs.uniform(2), placement, 2, 5, ps.Links(), [(1.0, 0.0)] * 2, [8.0] * 2, split=True)
    row = next(in_step(problem))
    made = problem.schedule(row, "made")
    ps.check(made)
    assert np.array_equal(problem.row(made), row)
    for r in range(2):
        assert {op.microbatch for op in made.order[r]} == set(range(5))
