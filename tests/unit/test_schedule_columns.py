"""Schedules as columns: what goes through all ops of a schedule makes none, and what asks for ops gets them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.dispatch import lower
from penstock.planning.in_step import in_step
from penstock.planning.problem import pose
from penstock.schedule.columns import columns_of

pytestmark = pytest.mark.unit

NAMES = ("gpipe", "1f1b", "zb-h1", "pipedream")
SIZES = ((1, 1), (1, 5), (4, 1), (4, 2), (3, 3), (4, 9), (6, 4))


def by_hand(name: str, num_ranks: int, num_microbatches: int) -> tuple[tuple[ps.Op, ...], ...]:
    """The orders op by op, as the docstrings of the library draw them."""
    rows = []
    for rank in range(num_ranks):
        if name == "gpipe":
            row = [ps.Op(kind, rank, m) for kind in "FB" for m in range(num_microbatches)]
        else:
            warmup = min(num_ranks - 1 - rank, num_microbatches)
            row = [ps.Op("F", rank, m) for m in range(warmup)]
            for m in range(num_microbatches):
                if warmup + m < num_microbatches:
                    row.append(ps.Op("F", rank, warmup + m))
                row.append(ps.Op("I" if name == "zb-h1" else "B", rank, m))
                if name == "zb-h1" and m >= rank:
                    row.append(ps.Op("W", rank, m - rank))
            if name == "zb-h1":
                row += [ps.Op("W", rank, m) for m in range(max(0, num_microbatches - rank), num_microbatches)]
        rows.append(tuple(row))
    return tuple(rows)


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_library_orders_are_what_they_were_op_by_op(name: str, num_ranks: int, num_microbatches: int) -> None:
    s = ps.build(name, num_ranks, num_microbatches)
    assert "order" not in vars(s)
    assert (s.num_ranks, s.num_ops) == (num_ranks, num_microbatches * num_ranks * (3 if name == "zb-h1" else 2))
    assert s.order == by_hand(name, num_ranks, num_microbatches)
    assert all(type(op.microbatch) is int and type(op.stage) is int for row in s.order for op in row)


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
    plain = ps.Schedule("zb-h1", s.placement, by_hand("zb-h1", 4, 9), s.microbatch_pipeline)
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
