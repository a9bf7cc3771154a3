"""The best schedules without mismatch: what is found is sorted, within the limits, and as good as can be proved."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.planning import flushed_schedules

pytestmark = pytest.mark.unit


def even(num_stages: int) -> ps.Costs:
    """A model whose work divides among any stages; over four ranks a microbatch takes each 3 ms."""
    if num_stages > 8:
        raise ps.CostError("eight layers")
    each = 4 / num_stages
    return ps.Costs.uniform(num_stages, each, each, each, activation=each)


@pytest.mark.slow
def test_with_even_stages_the_best_in_the_memory_of_1f1b_leaves_hardly_a_bubble() -> None:
    found = flushed_schedules(even, 4, 4, 6, memory_limit=4.0)
    assert [run.makespan for run in found] == sorted(run.makespan for run in found)
    ms = {run.name: run.makespan for run in found}
    assert ms["1f1b"] == 6 * (4 * 3 + 3 * 3)
    assert ms["zb-v"] <= 6 * 4 * 3 + 3 * 3  # after the first window one follows the other without a bubble
    assert 6 * 4 * 3 < found[0].makespan <= ms["zb-v"]
    for run in found:
        assert max(run.peaks) <= 4.0 + 1e-9
        ps.check(run.schedule, max_mismatch=0)
        assert run.schedule.num_microbatches == 6 * 4
        assert run.schedule.num_stages <= 8
        if run.dispatch == "frozen":
            assert ps.simulate(run.schedule, even(run.schedule.num_stages)).makespan == run.makespan


def test_limits_leave_out_what_does_not_fit_and_planning_takes_part() -> None:
    found = flushed_schedules(even, 2, 2, 2, fits=lambda t: t.schedule.placement.num_pipelines == 1, plan_seconds=0.1)
    assert {run.schedule.placement.num_pipelines for run in found} == {1}
    assert {"plan (one-to-one)", "plan (v)"} <= {run.name for run in found}
    with pytest.raises(ps.ScheduleError, match="no synchronous schedule of 2 microbatches over 2 ranks fits"):
        flushed_schedules(even, 2, 2, 2, memory_limit=0.5)
