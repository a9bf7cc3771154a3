"""Whatever the job and its links: caps hold, no more is paid than was lost, and the log replays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.control import (
    Action,
    Configuration,
    Controller,
    Dropped,
    Event,
    IterationEnded,
    Job,
    LinkDown,
    LinkUp,
    Measured,
    Offered,
    OpTimes,
    Prices,
    Switched,
    Transfers,
    candidates,
    rehearse,
    replay,
    run_once,
)
from penstock.control.configuration import fits, in_host, peaks
from penstock.control.decide import choose, score
from penstock.control.steps import WINDOW
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Trace
from tiers import examples, sample

pytestmark = pytest.mark.property

MS = st.integers(1, 12).map(float)
DELAY = st.sampled_from([0.0, 0.0, 1.0, 5.0, 20.0, 60.0, 150.0])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    name = draw(st.sampled_from(["zb", "zb-h1", "1f1b", "zb-v"]))
    num_ranks, num_microbatches = draw(st.integers(2, 4)), draw(st.integers(4, 9))
    schedule = ps.build(name, num_ranks, num_microbatches)
    times = st.lists(MS, min_size=schedule.num_stages, max_size=schedule.num_stages)
    sizes = st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = ps.Costs(draw(times), draw(times), draw(times), activation=draw(sizes))
    room = draw(st.sampled_from([0.0, 1.0, 4.0]))
    caps = tuple(peak + room for peak in peaks(schedule, costs))
    start = Configuration(schedule, draw(st.sampled_from(["frozen", "dynamic"])), (), caps)
    return Job(
        costs,
        start,
        host_memory=draw(st.sampled_from([0.0, 2.0, 20.0, tuple(3.0 * rank for rank in range(num_ranks))])),
        transport=draw(st.sampled_from(["decoupled", "blocking:1", "blocking:2", "gloo", "nccl-edge"])),
        prices=draw(st.sampled_from([Prices(), Prices(0, 0, 0), Prices(10, 50, 200)])),
        dispatches=draw(st.sampled_from([("frozen",), ("frozen", "dynamic")])),
    )


@st.composite
def conditions(draw: st.DrawFn, num_ranks: int) -> Links:
    found = {}
    for rank in range(num_ranks - 1):
        values = draw(st.lists(DELAY, min_size=1, max_size=4))
        times = tuple(1500.0 * at for at in range(len(values)))
        found[rank, rank + 1] = LinkCondition(Trace(times, tuple(values)))
    return Links(found)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_caps_hold_payments_are_covered_and_the_log_replays(data: st.DataObject) -> None:
    job = data.draw(jobs())
    links = data.draw(conditions(job.num_ranks))
    lines: list[str] = []
    controller = Controller(job, log=lines.append)
    run = rehearse(controller, links, until=5000.0, delay=data.draw(st.integers(0, 2)))
    configurations = {0: job.start} | {d.number: d.configuration for d in run.decisions}
    for each in run.iterations:
        caps = configurations[each.decision].caps
        assert all(peak <= cap * (1 + 1e-6) for peak, cap in zip(each.peaks, caps, strict=True))
    for decision in run.decisions:
        ps.check(decision.configuration.schedule)
        limits = job.host_limits if decision.configuration.delegated else (0.0,) * job.num_ranks
        assert decision.configuration.caps == job.start.caps
        assert all(waits <= more + 1e-6 for waits, more in zip(decision.in_host, limits, strict=True))
        assert decision.in_host == in_host(decision.configuration.schedule, job.costs)
        assert decision.configuration.dispatch in {job.start.dispatch, *job.dispatches}
    assert sum(each.price for each in run.decisions) <= controller.lost * (1 + 1e-9)
    assert [decision.number for decision in run.decisions] == list(range(1, len(run.decisions) + 1))
    assert replay(lines) == run.decisions


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_what_is_chosen_is_the_best_by_hand(data: st.DataObject) -> None:
    job = data.draw(jobs())
    delays = {(rank, rank + 1): data.draw(DELAY) for rank in range(job.num_ranks - 1)}
    links = ps.Links(delays)
    measured = Measured.steady(links, frozenset(link for link, ms in delays.items() if ms >= 1))
    found = candidates(job, job.start, measured)
    by_hand = [run_once(job, each.configuration, links).makespan for each in found]
    budget = data.draw(st.sampled_from([0.0, 20.0, 1e9]))
    chosen, lost = choose([score(job, measured, each) for each in found], budget, job.least_gain)
    affordable = [ms for ms, each in zip(by_hand, found, strict=True) if each.price <= budget]
    assert found[0].action is Action.KEEP
    if min(affordable) <= by_hand[0] * (1 - job.least_gain):
        assert chosen.ms == pytest.approx(min(affordable), rel=1e-9)
        assert chosen.price <= budget
    else:
        assert chosen.action is Action.KEEP
    assert lost == pytest.approx(max(0.0, by_hand[0] - min(by_hand)))


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_no_dead_link_is_used_once_a_decision_is_in_force(data: st.DataObject) -> None:
    job = data.draw(jobs())
    controller = Controller(job)
    down: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(1, 6))):
        rank = data.draw(st.integers(0, job.num_ranks - 2))
        link = (rank, rank + 1)
        event = LinkUp(link) if link in down and data.draw(st.booleans()) else LinkDown(link)
        if isinstance(event, LinkUp):
            down.discard(link)
        else:
            down.add(link)
        made = controller.feed(event)
        while made:
            made = controller.feed(Switched(made[0].number))
        assert down <= set(controller.now.delegated)
        assert controller.waiting is None
    assert controller.paid == 0.0


SMALL = ps.build("zb-h1", 3, 6)
SMALL_COSTS = ps.Costs.uniform(3, 10, 10, 10)
SMALL_LINKS = [(0, 1), (1, 0), (1, 2), (2, 1)]


@pytest.mark.slow
@settings(max_examples=sample(25, 5), deadline=None)
@given(st.data())
def test_whatever_is_reported_decisions_fit_and_are_few(data: st.DataObject) -> None:
    """Links and stages at levels that jump as they like, links that die, switches that fail."""
    job = Job(
        SMALL_COSTS,
        Configuration(SMALL, data.draw(st.sampled_from(["frozen", "dynamic"])), (), tuple(peaks(SMALL, SMALL_COSTS))),
        host_memory=data.draw(st.sampled_from([0.0, 6.0])),
        prices=data.draw(st.sampled_from([Prices(), Prices(0, 0, 0)])),
    )
    lines: list[str] = []
    controller = Controller(job, log=lines.append)
    made, by_dead_link, dropped, number = [], 0, 0, 0
    levels = dict.fromkeys(SMALL_LINKS, 1.0)
    factors = [1.0, 1.0, 1.0]

    def feed(event: Event) -> None:
        nonlocal by_dead_link
        for decision in controller.feed(event):
            made.append(decision)
            by_dead_link += decision.ms_now is None

    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["link", "link", "stage", "down", "up", "offered"]))
        link = data.draw(st.sampled_from(SMALL_LINKS))
        if what == "link":
            levels[link] = data.draw(st.sampled_from([0.0, 2.0, 20.0, 60.0]))
        elif what == "stage":
            factors[data.draw(st.integers(0, 2))] = data.draw(st.sampled_from([1.0, 1.3, 3.0]))
        elif what == "offered":
            feed(Offered(ps.build(data.draw(st.sampled_from(["zb", "1f1b", "zb-h2"])), 3, 6)))
        else:
            feed(LinkDown(link) if what == "down" else LinkUp(link))
        rng = random.Random(data.draw(st.integers(0, 99)))
        for _ in range(data.draw(st.sampled_from([2, 5, 12]))):
            for each, level in levels.items():
                rows = [(1e6, 30.0 * k, 30.0 * k + level * rng.uniform(0.8, 1.2)) for k in range(6)]
                feed(Transfers.of(each, rows))
            for stage, factor in enumerate(factors):
                feed(OpTimes(stage, stage, tuple((kind, (10 * factor, 10 * factor)) for kind in "FIW")))
            feed(IterationEnded(number, 250.0))
            number += 1
            waiting = controller.waiting
            if waiting is not None and data.draw(st.booleans()):
                event = Switched if data.draw(st.booleans()) else Dropped
                dropped += event is Dropped and made[-1].action is Action.TAKE_BACK
                feed(event(waiting.number))
    for decision in made:
        configuration = decision.configuration
        ps.check(configuration.schedule)
        assert configuration.caps == job.start.caps
        assert fits(configuration, job.costs)
    taken_back = sum(each.action is Action.TAKE_BACK for each in made)
    assert len(made) - by_dead_link - taken_back <= most_decisions(number)
    assert taken_back - dropped <= len(made) / 2  # one that was dropped is tried again
    assert replay(lines) == tuple(made)


def most_decisions(num_iterations: int) -> int:
    """The most switches in a number of iterations, without those that dead links force: where steps are never slower,
    each waits twice as long as the one before.
    """
    num, used = 1, 0
    while used + 2**num < WINDOW:
        used += 2**num
        num += 1
    return num * -(-num_iterations // WINDOW)


@pytest.mark.slow
def test_links_that_jump_for_ever_move_little() -> None:
    """The worst there is: every link healthy or 60 ms late, for as long as it takes to be believed."""
    job = Job(
        SMALL_COSTS,
        Configuration(SMALL, "frozen", (), tuple(peaks(SMALL, SMALL_COSTS))),
        host_memory=6.0,
        prices=Prices(0, 0, 0),
    )
    controller = Controller(job)
    made: list[int] = []
    for number in range(600):
        late = 60.0 if number // 12 % 2 else 0.0
        for link in SMALL_LINKS:
            controller.feed(Transfers.of(link, [(1e6, 30.0 * k, 30.0 * k + late) for k in range(6)]))
        ms = run_once(job, controller.now, ps.Links(dict.fromkeys(SMALL_LINKS, late))).makespan
        decisions = controller.feed(IterationEnded(number, ms))
        made += [each.iteration for each in decisions if each.action is not Action.TAKE_BACK]
        if controller.waiting is not None:
            controller.feed(Switched(controller.waiting.number))
    assert 1 <= len(made) <= most_decisions(WINDOW)
    assert max(made) < 300, made
