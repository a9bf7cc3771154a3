"""What the controller promises of lines of NCCL and gloo that turn late, and of delegates in their place."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

import penstock as ps
from penstock.control import Action, Configuration, Controller, Job, rehearse, run_once
from penstock.control.configuration import peaks

pytestmark = pytest.mark.unit

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
GPIPE = ps.build("gpipe", 4, 8)
LATE = ps.Links({(1, 2): 60.0})
TURNS_LATE = ps.Links.parse("1:2=latency:steps:0ms/0ms,5s/60ms,20s/0ms")


def job(transport: str, schedule: ps.Schedule = GPIPE) -> Job:
    start = Configuration(schedule, "frozen", (), tuple(peaks(schedule, COSTS)))
    return Job(COSTS, start, transport=transport, may_replan=False, dispatches=("frozen",))


@pytest.mark.parametrize("transport", ["nccl-edge", "gloo"])
def test_delegating_a_late_line_of_nccl_or_gloo_promised_nothing(transport: str) -> None:
    """Such lines were simulated as delegates are, so that a late one stayed."""
    given = job(transport)
    run = rehearse(Controller(given), TURNS_LATE, until=40_000)
    assert [each.action for each in run.decisions] == [Action.DELEGATE, Action.UNDELEGATE]
    assert run.decisions[0].configuration.delegated == ((1, 2),)
    late, delegated = given.start, replace(given.start, delegated=((1, 2),))
    promised = run.decisions[0].ms_now - run.decisions[0].ms_then
    kept = run_once(given, late, LATE).makespan - run_once(given, delegated, LATE).makespan
    assert promised == pytest.approx(kept, rel=0.05)
    assert run.iterations[-1].ms == run.iterations[0].ms


@pytest.mark.parametrize("name", ["1f1b", "zb", "gpipe"])
def test_a_line_of_nccl_carries_one_message_at_a_time(name: str) -> None:
    """Without delegates this is what `channels` says of a stream for each direction."""
    schedule = ps.build(name, 4, 8)
    placed = ps.simulate(schedule, COSTS, LATE, channels="nccl-edge").makespan
    assert ps.simulate(schedule, COSTS, LATE, transport="nccl-edge").makespan == pytest.approx(placed, rel=0.02)


def test_only_the_first_messages_of_a_step_wait_for_news_over_gloo() -> None:
    decoupled, late = (ps.simulate(GPIPE, COSTS, LATE, transport=each).makespan for each in ("decoupled", "gloo"))
    # The first message could leave after 20 ms, and news that its receive is posted takes 60.
    assert late == decoupled + 40


@pytest.mark.parametrize("transport", ["nccl-edge", "gloo"])
def test_lines_that_are_all_delegated_are_decoupled(transport: str) -> None:
    delegated = replace(job(transport).start, delegated=((0, 1), (1, 2), (2, 3)))
    links = ps.Links({(1, 2): 60.0}, default=5.0)
    expected = ps.simulate(GPIPE, COSTS, links).makespan
    assert run_once(job(transport), delegated, links).makespan == expected


@pytest.mark.parametrize("latency", ["uniform:40ms,80ms@50ms", "normal:60ms,10ms@30ms..80ms"])
def test_bug_the_first_messages_of_a_noisy_gloo_line_waited_for_news_twice(latency: str) -> None:
    """Once in their measured delays, and once more in the simulation of what runs now."""
    run = rehearse(
        Controller(job("gloo", ps.build("zb", 4, 8))), ps.Links.parse(f"1:2=latency:{latency}#3"), until=20_000
    )
    decision = run.decisions[0]
    measured = median(each.ms for each in run.iterations[: decision.iteration])
    assert decision.ms_now == pytest.approx(measured, rel=0.06)
