"""Schedules with their updates among the other ops: an iteration is a pass of several steps."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.control import Configuration, Controller, Job, rehearse, replay
from penstock.control.configuration import peaks

pytestmark = pytest.mark.unit

COSTS = ps.Costs.uniform(4, f=5, i=5, w=5)
AMDP = ps.build("amdp", 4, 64, window=16, max_mismatch=0)


@pytest.mark.parametrize("may_delegate", [True, False])
@pytest.mark.parametrize("pass_number", [1, 2, 5])
def test_a_link_late_for_two_passes_of_amdp_is_answered(pass_number: int, may_delegate: bool) -> None:
    """Three passes were needed to know what is usual, and two more to verify a change: 40 steps. The answer comes
    with the third late pass at the latest.
    """
    start = Configuration(AMDP, "frozen", caps=peaks(AMDP, COSTS))  # type: ignore[arg-type]
    job = Job(COSTS, start, may_replan=False, may_delegate=may_delegate)
    ms = ps.simulate(AMDP, COSTS).makespan
    late = ps.Links.parse(f"1:2=latency:steps:0ms/0ms,{pass_number * ms}ms/60ms")
    lines: list[str] = []
    run = rehearse(Controller(job, log=lines.append), late, until=40 * ms)
    assert replay(lines) == run.decisions
    assert run.decisions[0].iteration <= pass_number + 2
    assert run.iterations[-1].ms < max(each.ms for each in run.iterations)
    assert run.decisions[-1].configuration.schedule == AMDP, "updates stand where they stood"
