"""The controller: what it decides, when, what it pays, and that its log says it all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

import penstock as ps
from penstock.control import (
    Action,
    Configuration,
    ControlError,
    Controller,
    Decision,
    Dropped,
    Event,
    IterationEnded,
    Job,
    LinkDown,
    LinkUp,
    Measured,
    Offered,
    Prices,
    Switched,
    Transfers,
    candidates,
    measured_events,
    rehearse,
    replay,
    run_once,
)
from penstock.control.configuration import fits, in_host, job_from_json, job_to_json, peaks
from penstock.control.decide import Candidate, choose, score
from penstock.control.steps import BURST
from penstock.cost import Links
from penstock.planning import adapted_warmups
from proof_cases import in_host_memory

pytestmark = pytest.mark.unit

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
ZB = ps.build("zb", 4, 12)
JOB = Job(COSTS, Configuration(ZB, "frozen", (), tuple(peaks(ZB, COSTS))))
SLOW = Links.parse("2:3=latency:steps:0ms/0ms,5000ms/60ms")


def events_of(controller: Controller, links: ps.Links, number: int) -> list[Event]:
    return measured_events(run_once(controller.job, controller.now, links), number, COSTS)


def drive(controller: Controller, delays: Sequence[ps.Links], first: int = 0) -> list[Decision]:
    """Runs iterations; switches one iteration after each decision."""
    made: list[Decision] = []
    for number, links in enumerate(delays, start=first):
        if controller.waiting is not None:
            controller.feed(Switched(controller.waiting.number))
        for event in events_of(controller, links, number):
            made += controller.feed(event)
    return made


HEALTHY, LATE = ps.Links(), ps.Links({(2, 3): 60.0})


# When it decides


@pytest.mark.parametrize("link", [(0, 1), (1, 2), (2, 3)])
def test_a_link_slowed_down_is_decided_on_as_soon_as_it_is_no_burst(link: tuple[int, int]) -> None:
    late = ps.Links({link: 60.0})
    made = drive(Controller(JOB), [HEALTHY] * 20 + [late] * 10)
    assert [decision.iteration for decision in made] == [20 + BURST]  # iterations 20 to 23 were slow
    decision = made[0]
    assert decision.ms_now == run_once(JOB, JOB.start, late).makespan
    assert decision.ms_then == run_once(JOB, decision.configuration, late).makespan
    assert decision.ms_then < decision.ms_now
    assert f"messages of link {link[0]}:{link[1]} take 60 ms instead of 0" in decision.reason


@pytest.mark.parametrize("moment", [3000.0, 3100.0, 3200.0, 3300.0, 3399.0])
def test_the_new_plan_runs_at_most_six_iterations_after_the_slow_one(moment: float) -> None:
    conditions = Links.parse(f"2:3=latency:steps:0ms/0ms,{moment}ms/60ms")
    run = rehearse(Controller(JOB), conditions, until=12_000)
    first_slow = next(each.number for each in run.iterations if each.start + each.ms > moment)
    first_new = next(each.number for each in run.iterations if each.decision)
    assert first_new - first_slow <= 6
    # Of these the first was slow in part, and the last ran while all ranks agreed.
    assert run.iterations[-1].ms < run.iterations[first_new - 1].ms


def test_recovery_goes_back_once_and_late() -> None:
    controller = Controller(JOB)
    made = drive(controller, [HEALTHY] * 10 + [LATE] * 20 + [HEALTHY] * 60)
    assert [decision.action for decision in made] == [Action.DELEGATE, Action.UNDELEGATE]
    assert made[1].iteration >= 30 + 5
    assert controller.now.delegated == ()


@pytest.mark.slow
def test_a_link_that_comes_and_goes_is_left_in_peace_longer_and_longer() -> None:
    controller = Controller(JOB)
    made = drive(controller, ([HEALTHY] * 8 + [LATE] * 8) * 20)
    # 20 times slow and 20 times healthy again: without patience that would be 40 switches.
    assert len(made) <= 8
    assert max(decision.iteration for decision in made) < 160


# What it decides


def test_the_decision_is_the_best_of_all_candidates() -> None:
    scenarios = [
        ps.Links({(2, 3): 60.0}),
        ps.Links({(0, 1): 30.0, (1, 2): 30.0}),
        ps.Links({(0, 1): 30.0, (2, 3): 15.0}),
        HEALTHY,
    ]
    for links, host in itertools.product(scenarios, (0.0, 6.0)):
        job = replace(JOB, host_memory=host, prices=Prices(0.0, 0.0, 0.0))
        late = frozenset(links.delays)
        measured = Measured.steady(links, late)
        found = candidates(job, job.start, measured)
        # By hand, one simulation each, without the machinery's own scores.
        by_hand = [run_once(job, each.configuration, links).makespan for each in found]
        chosen, lost = choose([score(job, measured, each) for each in found], 1e9, job.least_gain)
        if min(by_hand) <= by_hand[0] * (1 - job.least_gain):
            assert chosen.ms == min(by_hand)
        else:
            assert chosen.action is Action.KEEP
        assert lost == by_hand[0] - min(by_hand)


def test_candidates_cover_all_remedies_and_each_fits_its_caps() -> None:
    job = replace(JOB, host_memory=6.0)
    measured = Measured.steady(LATE, frozenset({(2, 3)}))
    found = candidates(job, job.start, measured)
    assert {each.action for each in found} == set(Action) - {Action.UNDELEGATE, Action.TAKE_BACK, Action.MOVE}
    assert found[0].action is Action.KEEP
    for each in found:
        ps.check(each.configuration.schedule)
        assert fits(each.configuration, COSTS)
        assert each.configuration.caps == JOB.start.caps
        moved = in_host(each.configuration.schedule, COSTS)
        assert max(moved) <= (6.0 if each.configuration.delegated else 0.0)
        peak = run_once(job, each.configuration, LATE).peak_activations
        assert all(p <= cap * (1 + 1e-9) for p, cap in zip(peak, each.configuration.caps, strict=True))


def test_host_memory_lets_algorithm_2_run() -> None:
    capped = replace(JOB, dispatches=("frozen",))
    tight = Job(
        COSTS, Configuration(ps.build("zb-h1", 4, 12), "frozen", (), (4.0, 4.0, 4.0, 4.0)), dispatches=("frozen",)
    )
    late = ps.Links({(0, 1): 30.0})
    measured = Measured.steady(late, frozenset({(0, 1)}))
    for job in (capped, tight):
        hosted = replace(job, host_memory=20.0)
        best = [min(score(j, measured, c).ms for c in candidates(j, j.start, measured)) for j in (job, hosted)]
        assert best[1] <= best[0]
    assert best[1] < best[0]
    warmups = adapted_warmups(COSTS, late, 12)
    assert max(warmups) > 4


def test_a_decision_that_counts_on_host_memory_moves_activations_there() -> None:
    """A decision once raised the caps, and its schedule held F, I and W alone: nothing was moved anywhere."""
    tight = Configuration(ps.build("zb-h1", 4, 12), "frozen", (), (4.0, 4.0, 4.0, 4.0))
    late = ps.Links({(0, 1): 60.0})
    for limits, more in (((0.0, 0.0, 0.0, 0.0), 0), ((3.0, 2.0, 0.0, 1.0), 2), (8.0, 4)):
        job = Job(COSTS, tight, host_memory=limits, prices=Prices(0, 0, 0))
        made = drive(Controller(job), [HEALTHY] * 10 + [late] * 8)
        ran = run_once(job, made[-1].configuration, late)
        assert made[-1].peaks == ran.peak_activations
        assert max(made[-1].peaks) <= 4.0
        waiting = [in_host_memory(ran, rank, [1.0] * 4) for rank in range(4)]
        assert all(0 <= moved <= most for moved, most in zip(waiting, made[-1].in_host, strict=True))
        copies = {timed.op.kind: timed.end - timed.start for timed in ran.ops}
        assert not more or copies["OFFLOAD"] == copies["RELOAD"] == 10.0
        assert all(waits <= limit for waits, limit in zip(made[-1].in_host, job.host_limits, strict=True))
        assert max(made[-1].in_host) >= more
        assert job_from_json(json.loads(json.dumps(job_to_json(job)))) == job
    with pytest.raises(ControlError, match="one per rank"):
        replace(JOB, host_memory=(1.0, 2.0))


def test_without_delegates_nothing_waits_in_host_memory() -> None:
    """A late link once stopped being delegated while the order for it stayed, with activations in host memory."""
    costs, zb = ps.Costs.uniform(4, f=1, i=1, w=1), ps.build("zb", 4, 4)
    start = Configuration(zb, "frozen", (), tuple(peaks(zb, costs)))
    controller = Controller(Job(costs, start, host_memory=2.0, transport="decoupled", dispatches=("frozen",)))
    run = rehearse(controller, Links({(2, 3): 5.0}), until=5000, delay=0)
    assert run.decisions[0].configuration.delegated == ((2, 3),)
    assert sum(run.decisions[0].in_host) > 0
    assert all(each.configuration.delegated or not any(each.in_host) for each in run.decisions)


def test_a_job_may_forbid_remedies() -> None:
    measured = Measured.steady(LATE, frozenset({(2, 3)}))
    only_dispatch = replace(JOB, may_replan=False, may_delegate=False)
    actions = {each.action for each in candidates(only_dispatch, JOB.start, measured)}
    assert actions == {Action.KEEP, Action.DISPATCH}
    frozen = replace(JOB, dispatches=("frozen",), may_delegate=False)
    actions = {each.action for each in candidates(frozen, JOB.start, measured)}
    assert actions == {Action.KEEP, Action.REPLAN}


def test_only_the_slow_link_is_delegated() -> None:
    controller = Controller(JOB)
    drive(controller, [HEALTHY] * 10 + [LATE] * 5)
    assert controller.now.delegated == ((2, 3),)


@pytest.mark.slow
def test_an_offered_schedule_is_chosen_where_it_is_best() -> None:
    planned = ps.plan(COSTS, 4, 12, LATE, memory_limit=list(JOB.start.caps), time_limit=1.0).schedule
    controller = Controller(replace(JOB, dispatches=("frozen",)))
    controller.feed(Offered(planned.renamed("offered")))
    made = drive(controller, [HEALTHY] * 10 + [LATE] * 6)
    best = min(
        run_once(JOB, replace(JOB.start, schedule=s, delegated=((2, 3),)), LATE).makespan for s in (planned, ZB)
    )
    assert run_once(JOB, controller.now, LATE).makespan <= best
    assert made


# What it pays


def test_cheap_remedies_come_first_and_never_more_is_paid_than_was_lost() -> None:
    prices = Prices(dispatch=0.0, replan=100.0, delegate=1500.0)
    start = replace(JOB, prices=prices, dispatches=("frozen",), transport="blocking:1")
    late = ps.Links({(0, 1): 30.0})
    controller = Controller(start)
    made: list[Decision] = []
    for number in range(40):
        if controller.waiting is not None:
            controller.feed(Switched(controller.waiting.number))
        for event in events_of(controller, HEALTHY if number < 10 else late, number):
            made += controller.feed(event)
            assert sum(decision.price for decision in made) <= controller.lost
    assert [decision.price for decision in made] == sorted(decision.price for decision in made)
    assert len(made) == 2
    assert made[0].action is Action.REPLAN
    assert made[0].iteration < made[1].iteration
    assert controller.paid == 0.0, "what is simulated takes no time to prepare"


def test_a_price_above_all_losses_is_never_paid() -> None:
    start = replace(JOB, prices=Prices(1e6, 1e6, 1e6))
    assert drive(Controller(start), [HEALTHY] * 5 + [LATE] * 20) == []


def test_choose_takes_the_cheapest_among_equals_and_nothing_without_gain() -> None:
    def scored(action: Action, ms: float, price: float) -> Candidate:
        return Candidate(action, JOB.start, price, ms)

    keep = scored(Action.KEEP, 100.0, 0.0)
    dear, cheap = scored(Action.DELEGATE, 80.0, 50.0), scored(Action.REPLAN, 80.0, 5.0)
    assert choose([keep, dear, cheap], 60.0, 0.02) == (cheap, 20.0)
    assert choose([keep, dear], 40.0, 0.02) == (keep, 20.0)
    little = scored(Action.REPLAN, 99.0, 0.0)
    assert choose([keep, little], 60.0, 0.02) == (keep, 1.0)
    back = scored(Action.UNDELEGATE, 100.0, 0.0)
    assert choose([keep, back], 0.0, 0.02)[0] is keep
    assert choose([keep, back], 0.0, 0.02, returning=True)[0] is back
    assert choose([dear], 0.0, 0.02) == (dear, 0.0)


def test_a_candidate_that_is_slower_in_one_scenario_is_none() -> None:
    keep = Candidate(Action.KEEP, JOB.start, 0.0, 100.0, (100.0, 100.0))
    mixed = Candidate(Action.REPLAN, JOB.start, 0.0, 90.0, (70.0, 110.0))
    sure = Candidate(Action.DELEGATE, JOB.start, 0.0, 95.0, (94.0, 96.0))
    assert choose([keep, mixed], 1e9, 0.02) == (keep, 0.0)
    assert choose([keep, mixed, sure], 1e9, 0.02) == (sure, 5.0)


# Dead links


def test_a_dead_link_is_delegated_at_once_whatever_it_costs() -> None:
    controller = Controller(replace(JOB, prices=Prices(1e6, 1e6, 1e6)))
    drive(controller, [HEALTHY] * 5)
    (decision,) = controller.feed(LinkDown((2, 1)))
    assert decision.configuration.delegated == ((1, 2),)
    assert decision.ms_now is None
    assert "link 1:2 is down" in decision.reason
    controller.feed(Switched(decision.number))
    assert controller.paid == 0.0
    assert drive(controller, [HEALTHY] * 30, first=5) == []
    controller.feed(LinkUp((1, 2)))
    back = drive(controller, [HEALTHY] * 30, first=35)
    assert [each.action for each in back] == [Action.UNDELEGATE]
    assert back[0].iteration >= 35 + 5


def test_a_dead_link_during_another_switch_waits_for_its_end() -> None:
    controller = Controller(JOB)
    (first,) = drive(controller, [HEALTHY] * 10 + [LATE] * (BURST + 1))
    assert controller.feed(LinkDown((0, 1))) == ()
    (second,) = controller.feed(Dropped(first.number))
    assert second.number == first.number + 1
    assert (0, 1) in second.configuration.delegated


def test_a_dropped_decision_is_made_again_after_a_while() -> None:
    controller = Controller(JOB)
    (first,) = drive(controller, [HEALTHY] * 10 + [LATE] * (BURST + 1))
    controller.feed(Dropped(first.number))
    (second,) = drive(controller, [LATE] * 10, first=11 + BURST)[:1]
    assert second.iteration == first.iteration + 6
    assert (second.number, second.configuration) == (first.number + 1, first.configuration)


def test_a_dead_link_that_cannot_be_delegated_is_answered_by_nothing() -> None:
    controller = Controller(replace(JOB, may_delegate=False))
    assert controller.feed(LinkDown((0, 1))) == ()


def test_bug_a_lost_interface_silenced_the_controller_where_links_cannot_be_delegated() -> None:
    """With --transport delegate the delegates go on by another interface, and the controller has to go on, too."""
    lines: list[str] = []
    controller = Controller(replace(JOB, may_delegate=False), log=lines.append)
    drive(controller, [HEALTHY] * 5)
    assert controller.feed(LinkDown((0, 1))) == ()
    made = drive(controller, [HEALTHY] * 10 + [LATE] * (BURST + 1), first=5)
    for number in range(16 + BURST, 60):
        if controller.waiting is not None:
            controller.feed(Switched(controller.waiting.number))
        slow = 1 if controller.now == JOB.start else 2
        for event in events_of(controller, LATE, number):
            made += controller.feed(
                replace(event, ms=slow * event.ms) if isinstance(event, IterationEnded) else event
            )
    assert made[0].ms_now is not None, "no dead link forced it"
    assert [each.action for each in made[:2]] == [Action.DISPATCH, Action.TAKE_BACK]
    assert replay(lines) == tuple(made)


# The log


@pytest.mark.slow
def test_a_log_replays_to_the_same_decisions() -> None:
    lines: list[str] = []
    controller = Controller(replace(JOB, host_memory=4.0), log=lines.append)
    conditions = Links.parse(
        ["2:3=latency:steps:0ms/0ms,5000ms/60ms,15000ms/0ms", "0:1=latency:normal:20ms,8ms@100ms..300ms"]
    )
    run = rehearse(controller, conditions, until=20_000)
    assert len(run.decisions) >= 2
    assert replay(lines) == run.decisions
    assert (
        replay(lines[: len(lines) // 2])
        == run.decisions[: sum("decision" in x[:12] for x in lines[: len(lines) // 2])]
    )


def test_a_log_that_was_changed_does_not_replay() -> None:
    lines: list[str] = []
    rehearse(Controller(JOB, log=lines.append), SLOW, until=9_000)
    at = next(n for n, line in enumerate(lines) if line.startswith('{"decision"'))
    other = lines.copy()
    other[at] = other[at].replace('"number":1', '"number":2')
    with pytest.raises(ControlError, match=f"line {at + 1}"):
        replay(other)
    with pytest.raises(ControlError, match=rf"line {at + 1}: the log has .*replayed: .*decision"):
        replay(lines[:at] + lines[at + 1 :])
    with pytest.raises(ControlError, match="first line"):
        replay(lines[1:])
    with pytest.raises(ControlError, match="not JSON"):
        replay([lines[0], "{", *lines[1:]])
    assert replay([*lines, lines[-1][:10]]) == replay(lines)
    with pytest.raises(ControlError, match="no event"):
        replay([lines[0], json.dumps({"event": {"holiday": {}}}), lines[1]])


def test_jobs_and_configurations_come_back_from_json() -> None:
    job = replace(JOB, host_memory=3.0, least_delay=2.0, prices=Prices(1, 2, 3))
    assert job_from_json(json.loads(json.dumps(job_to_json(job)))) == job
    for each in candidates(job, job.start, Measured.steady(LATE, frozenset({(2, 3)}))):
        again = Configuration.from_json(each.configuration.to_json())
        assert again == each.configuration
        assert again.digest == each.configuration.digest


def test_digests_tell_configurations_apart() -> None:
    found = candidates(JOB, JOB.start, Measured.steady(LATE, frozenset({(2, 3)})))
    assert len({each.configuration.digest for each in found}) == len(found)


# Errors


def test_events_out_of_order_are_refused() -> None:
    controller = Controller(JOB)
    controller.feed(IterationEnded(3, 400.0))
    with pytest.raises(ControlError, match="ascending order"):
        controller.feed(IterationEnded(3, 400.0))
    with pytest.raises(ControlError, match="none is waiting"):
        controller.feed(Switched(1))
    with pytest.raises(ControlError, match="ranks go from 0 to 3"):
        controller.feed(Transfers((3, 4), (1.0,), (1.0,)))


def test_jobs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ControlError, match="raise them"):
        Job(COSTS, replace(JOB.start, caps=(1.0, 1.0, 1.0, 1.0)))
    with pytest.raises(ps.CostError, match="for 3 stages"):
        Job(ps.Costs.uniform(3), JOB.start)
    with pytest.raises(ControlError, match="host_memory"):
        replace(JOB, host_memory=-1.0)
    with pytest.raises(ControlError, match="price of replan"):
        Prices(replan=float("nan"))
    with pytest.raises(ControlError, match="one per rank"):
        Configuration(ZB, "frozen", (), (1.0,))
    with pytest.raises(ControlError, match="no configuration"):
        Configuration.from_json("{}")


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_other_placements_and_whole_backwards_get_what_fits_them(name: str) -> None:
    schedule = ps.build(name, 4, 12, **({"num_stages": 8} if name == "interleaved-1f1b" else {}))
    costs = ps.Costs.uniform(schedule.num_stages, f=10, i=10, w=10)
    job = Job(costs, Configuration(schedule, "frozen", (), tuple(peaks(schedule, costs))))
    measured = Measured.steady(LATE, frozenset({(2, 3)}))
    found = candidates(job, job.start, measured)
    scores = [score(job, measured, each).ms for each in found]
    assert min(scores) < scores[0]
    assert all(fits(each.configuration, costs) for each in found)


def test_a_decision_some_steps_after_the_onset_simulated_the_step_in_which_the_link_became_late() -> None:
    """Half of that step had no delay, so a cheaper change looked as good as the one that saves most."""
    costs, start = ps.Costs.uniform(4, f=3, i=3, w=3), ps.build("zb-h1", 4, 6)
    job = Job(costs, Configuration(start, "frozen", caps=tuple(peaks(start, costs))))  # type: ignore[arg-type]
    ms = ps.simulate(start, costs).makespan
    late = ps.Links.parse(f"2:3=latency:steps:0ms/0ms,{9.4 * ms}ms/80ms")
    first = rehearse(Controller(job), late, until=40 * ms).decisions[0]
    assert first.ms_now == run_once(job, job.start, ps.Links({(2, 3): 80.0})).makespan


def test_an_answer_to_a_link_that_was_late_from_the_start_names_it() -> None:
    """Nothing turned late, so the reason named a dispatch and no link."""
    run = rehearse(Controller(JOB), Links.parse("1:2=latency:60ms"), until=6_000)
    assert run.decisions[0].reason.startswith("link 1:2 is 60 ms late; ")
