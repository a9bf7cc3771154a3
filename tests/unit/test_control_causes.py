"""What each kind of straggler leads to, in rehearsal: its cause named, the right remedy, near the best there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.control import (
    Action,
    Configuration,
    ControlError,
    Controller,
    Decision,
    Job,
    Measured,
    OpTimes,
    Switched,
    candidates,
    measured_events,
    rehearse,
    replay,
    run_once,
)
from penstock.control.advice import what_would_help
from penstock.control.configuration import peaks
from penstock.control.watches import ComputeWatch, scaled
from penstock.cost import Links
from tiers import others_nightly

pytestmark = pytest.mark.unit

MB = 2.0**20
COSTS = ps.Costs([10.0] * 4, [10.0] * 4, [10.0] * 4, message_bytes=[16 * MB] * 4)


def job_of(name: str, **options: object) -> Job:
    schedule = ps.build(name, 4, 12)
    return Job(COSTS, Configuration(schedule, "frozen", (), tuple(peaks(schedule, COSTS))), **options)


def after(job: Job, conditions: Links) -> tuple[list[Decision], float]:
    """Ten healthy iterations and thirty under `conditions`: the decisions, and the last iteration's time."""
    controller = Controller(job)
    made: list[Decision] = []
    now = 0.0
    for number in range(40):
        if controller.waiting is not None and number >= made[-1].iteration + 2:
            controller.feed(Switched(controller.waiting.number))
        links = conditions if number >= 10 else Links()
        ran = run_once(job, controller.now, links, now)
        for event in measured_events(ran, number, COSTS):
            made += controller.feed(event)
        now += ran.makespan
    return made, ran.makespan


def best(job: Job, conditions: Links) -> float:
    """The best of candidates made for many delays, each simulated under just these conditions."""
    found = []
    for ms in (0.0, 10.0, 20.0, 40.0, 60.0, 80.0):
        links = ps.Links(dict.fromkeys(conditions.conditions, ms))
        every = candidates(job, job.start, Measured.steady(links, frozenset(conditions.conditions)))
        found += [run_once(job, each.configuration, conditions).makespan for each in every]
    return min(found)


CAUSES = [
    ("2:3=latency:60ms", "latency"),
    ("0:1=latency:30ms", "latency"),
    ("2:3=occupancy:25ms", "occupancy"),
    ("0:1=occupancy:35ms", "occupancy"),
    ("1:2=occupancy:28ms+latency:20ms", "occupancy"),
    ("2:3=bandwidth:0.6GB/s", "occupancy"),  # all messages have one size: busy, whatever with
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "cause", "host"),
    others_nightly(
        [(*case, host) for case in CAUSES for host in (0.0, 8.0)],
        [(*case, 8.0 * (number % 2)) for number, case in enumerate(CAUSES)],
    ),
)
def test_links_late_and_busy_are_told_apart_and_answered_as_well_as_can_be(
    text: str, cause: str, host: float
) -> None:
    job, conditions = job_of("zb", host_memory=host), Links.parse(text)
    made, last = after(job, conditions)
    assert made
    assert {each for decision in made for each in decision.causes} == {cause}
    assert last <= best(job, conditions) * 1.001
    assert made[-1].ms_then == pytest.approx(last, rel=0.02)  # what was predicted


@pytest.mark.parametrize("text", ["2:3=latency:2ms+loss:0.002%,150ms", "0:1=latency:2ms+loss:0.002%,100ms#3"])
def test_loss_is_named(text: str) -> None:
    made, _ = after(job_of("zb"), Links.parse(text))
    assert made
    assert made[0].causes == ("loss",)


def test_a_busy_link_is_not_simulated_as_a_late_one() -> None:
    job = job_of("zb", dispatches=("frozen",))
    busy, late = (Links.parse(f"2:3={kind}:40ms") for kind in ("occupancy", "latency"))
    dynamic = replace(job.start, dispatch="dynamic", delegated=((2, 3),))
    assert run_once(job, dynamic, busy).makespan > 1.15 * run_once(job, dynamic, late).makespan


def test_a_busy_link_is_answered_as_soon_as_a_late_one() -> None:
    """Steps were simulated as busy without the late link as with it, so nothing explained why they were slower."""
    busy, late = (after(job_of("zb"), Links.parse(f"2:3={each}"))[0] for each in ("occupancy:25ms", "latency:60ms"))
    assert busy[0].iteration == late[0].iteration


@pytest.mark.parametrize(
    ("host_memory", "size", "may_delegate"),
    [(0.0, 1.0, True), (3.0, 1.0, True), (0.0, 2e9, True), (0.0, 1.0, False), (0.0, 2e9, False)],
)
def test_bug_the_memory_that_would_help_was_not_the_memory_that_was_simulated(
    host_memory: float, size: float, may_delegate: bool
) -> None:
    """Host memory was named where links can't be delegated, and where it would have been used, the wrong amount."""
    costs = replace(COSTS, activation=(size,) * 4, message_bytes=())
    schedule = ps.build("zb-h1", 4, 12)
    caps = tuple(peaks(schedule, costs))
    start = Configuration(schedule, "frozen", (), caps)
    job = Job(costs, start, host_memory=host_memory, may_delegate=may_delegate)
    measured = Measured.steady(ps.Links({(0, 1): 60.0}), frozenset({(0, 1)}))
    (help,) = (each for each in what_would_help(job, start, measured) if "per rank" in each.what)
    more = int(help.what.split()[1])
    if not may_delegate:
        assert help.option == f"ps.AdaptOptions(memory_limit={tuple(cap + more * size for cap in caps)})"
    elif size > 1:
        assert help.option == f"--set host_memory={more * size:.0f}B"
    else:
        assert help.option == f"--set host_memory={more + host_memory:g}"


# Compute


def slowed(stage: int, factor: float, kinds: str = "FIW") -> ps.Costs:
    rows = {kind: [10.0] * 4 for kind in "FIW"}
    for kind in kinds:
        rows[kind][stage] *= factor
    return ps.Costs(rows["F"], rows["I"], rows["W"])


@pytest.mark.parametrize(
    ("link", "costs", "dispatches", "action"),
    [
        ("0:1=20", slowed(1, 1.6), ("frozen",), Action.REPLAN),
        ("0:1=20", slowed(3, 1.3), ("frozen",), Action.REPLAN),
        ("2:3=15", slowed(1, 2.0, "I"), ("frozen", "dynamic"), Action.DISPATCH),
    ],
)
def test_a_rank_that_turns_slow_is_planned_for(
    link: str, costs: ps.Costs, dispatches: tuple[str, ...], action: Action
) -> None:
    job = job_of("zb-h1", dispatches=dispatches)
    lines: list[str] = []
    controller = Controller(job, log=lines.append)
    run = rehearse(controller, Links.parse(link), until=25_000, costs=lambda at: costs if at >= 8000 else COSTS)
    slow = next(each.number for each in run.iterations if each.start >= 8000)
    (decision,) = [each for each in run.decisions if each.iteration >= slow]
    assert decision.iteration <= slow + 4
    assert (decision.action, decision.causes) == (action, ("compute",))
    assert "compute" in decision.reason
    assert decision.ms_now == run.iterations[slow].ms
    assert run.iterations[-1].ms == pytest.approx(decision.ms_then, rel=0.01)
    assert run.iterations[-1].ms < 0.98 * run.iterations[slow].ms
    assert replay(lines) == run.decisions


@pytest.mark.parametrize("rank", range(4))
def test_where_a_slow_rank_sets_the_pace_nothing_is_changed(rank: int) -> None:
    job = job_of("zb")
    slow = slowed(rank, 1.3)
    run = rehearse(Controller(job), Links(), until=20_000, costs=lambda at: slow if at >= 5000 else COSTS)
    assert run.decisions == ()
    # Rightly so: no schedule is shorter.
    plan = ps.plan(slow, 4, 12, memory_limit=list(job.start.caps), time_limit=2.0)
    assert run.iterations[-1].ms == pytest.approx(plan.lower_bound)


def test_factors_are_those_of_each_kind_and_gone_with_the_straggler() -> None:
    watch = ComputeWatch(1, 1, 1.0)
    changes, factors = [], []
    for number in range(60):
        factor = 1.3 if 20 <= number < 30 else 1.0
        took = OpTimes(1, 1, (("F", (10.0, 10.0)), ("I", (12.0 * factor,) * 2), ("W", (8.0 * factor,) * 2)))
        if change := watch.feed(took):
            changes.append((number, change))
            factors.append(watch.factors)
    (up, slower), (down, faster) = changes
    assert up == 22  # five halves
    assert slower.num_iterations == 3
    assert factors[0] == pytest.approx({"I": 1.3, "W": 1.3}, rel=0.01)
    assert (slower.change.before, slower.change.after) == (30.0, 36.0)
    assert down == 35  # twelve halves
    assert factors[1] == {}
    assert faster.num_iterations == 6


def test_costs_follow_the_factors() -> None:
    costs = ps.Costs([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])
    found = scaled(costs, ((1, "F", 2.0), (1, "I", 1.5)))
    assert (found.f, found.i, found.w) == ((1.0, 4.0), (3.0, 6.0), (5.0, 6.0))
    assert found.b == (8.0, 12.0)
    whole = scaled(costs, ((0, "B", 2.0),))
    assert (whole.b, whole.i, whole.w) == ((16.0, 10.0), (6.0, 4.0), (10.0, 6.0))
    assert scaled(costs, ()) is costs


def test_ops_of_ranks_that_are_not_there_are_refused() -> None:
    controller = Controller(job_of("zb"))
    for rank, stage in ((4, 0), (0, 4)):
        with pytest.raises(ControlError, match="ranks go from 0 to 3, stages to 3"):
            controller.feed(OpTimes(rank, stage, (("F", (1.0, 1.0)),)))
    with pytest.raises(ControlError, match="rank of OpTimes"):
        OpTimes(-1, 0, ())
    with pytest.raises(ControlError, match="ms of OpTimes"):
        OpTimes(0, 0, (("F", (1.0, float("nan"))),))
