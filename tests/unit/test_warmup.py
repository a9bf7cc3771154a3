"""Warm-up counts and schedules for slow links: the paper's figures, its theorem, and what was wrong in it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.planning import (
    adapted_warmups,
    initial_warmups,
    needed_slack,
    slow_link_schedule,
    tolerance,
    tolerances,
)
from tiers import examples

pytestmark = pytest.mark.unit

TEN = ps.Costs.uniform(4, f=10, i=10, w=10)


def late(link: int, delay: float) -> ps.Links:
    return ps.Links({(link, link + 1): delay})


# -- Eq. 1 ---------------------------------------------------------------------------------------------------------


def test_a_slack_tolerates_what_theorem_1_says() -> None:
    assert [tolerance(TEN, 0, slack) for slack in (0, 1, 2, 3, 4)] == [-10, 0, 10, 20, 30]


def test_times_that_differ_enter_from_the_right_stage() -> None:
    costs = ps.Costs(f=[8, 6, 5], i=[12, 4, 5], w=[1, 1, 1])
    assert tolerance(costs, 0, 4) == (4 * 10 - 20) / 2
    assert tolerance(costs, 0, 4, "B") == (4 * 11 - 21) / 2
    assert needed_slack(costs, 0, 10) == 4
    assert needed_slack(costs, 0, 10.01) == 5


@given(
    times=st.lists(st.floats(0.1, 50), min_size=4, max_size=4),
    delay=st.floats(0, 200),
)
def test_the_needed_slack_is_the_least_that_tolerates(times: list[float], delay: float) -> None:
    costs = ps.Costs(f=times[:2], i=times[2:], w=[1, 1])
    slack = needed_slack(costs, 0, delay)
    assert tolerance(costs, 0, slack) >= delay - 1e-6
    assert tolerance(costs, 0, slack - 1) < delay + 1e-6


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("zb", {(0, 1): 10.0, (1, 2): 10.0, (2, 3): 10.0}),
        ("zb-h1", {(0, 1): 0.0, (1, 2): 0.0, (2, 3): 0.0}),
        ("1f1b", {(0, 1): 0.0, (1, 2): 0.0, (2, 3): 0.0}),
        ("gpipe", {(0, 1): math.inf, (1, 2): math.inf, (2, 3): math.inf}),
    ],
)
def test_a_schedule_tells_what_its_links_tolerate(name: str, want: dict[tuple[int, int], float]) -> None:
    assert tolerances(ps.build(name, 4, 12), TEN) == want


def test_tolerances_are_for_one_stage_a_rank() -> None:
    with pytest.raises(ps.ScheduleError, match="one stage per rank"):
        tolerances(ps.build("zb-v", 2, 4), ps.Costs.uniform(4))
    with pytest.raises(ps.CostError, match="the costs are for 3 stages"):
        tolerances(ps.build("1f1b", 4, 4), ps.Costs.uniform(3))


# -- Algorithm 1 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "memory", "want"),
    [
        (4, 7, (7, 5, 3, 1)),
        (4, 10, (10, 7, 4, 1)),
        (4, 9, (9, 6, 3, 1)),
        (4, 8, (8, 5, 3, 1)),
        (4, 3, (3, 2, 1, 1)),
        (1, 5, (1,)),
        (4, 100, (12, 8, 4, 1)),
    ],
)
def test_memory_is_spread_over_the_links(stages: int, memory: float, want: tuple[int, ...]) -> None:
    assert initial_warmups(stages, 12, memory, 1) == want


@settings(deadline=None, max_examples=examples(60))
@given(caps=st.lists(st.integers(1, 7), min_size=1, max_size=4), num=st.integers(1, 6))
def test_no_counts_within_memory_have_a_larger_least_slack(caps: list[int], num: int) -> None:
    """The sorted slacks are the largest there are, found by trying all counts."""
    counts = initial_warmups(len(caps), num, caps, 1)
    assert all(count <= min(cap, num) for count, cap in zip(counts, caps, strict=True))

    def slacks(xs: tuple[int, ...]) -> list[int]:
        return sorted(a - b for a, b in itertools.pairwise(xs))

    every = itertools.product(*(range(1, min(cap, num) + 1) for cap in caps))
    falling = [xs for xs in every if slacks(xs) == [] or slacks(xs)[0] >= 0]
    assert slacks(counts) == max(slacks(xs) for xs in falling if xs[-1] == 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0.5}, "stage 0 has memory 0.5, of which 0 is reserved: no room for one forward, which keeps 1"),
        ({"memory": 5, "reserved": [0, 5, 0, 0]}, "stage 1 has memory 5, of which 5 is reserved"),
        ({"memory": [4, 4]}, "memory has 2 entries; give one per stage, 4 in all"),
        ({"memory": float("nan")}, "memory of stage 0 is nan"),
        ({"memory": 5, "activation": -1}, "activation of stage 0 is -1"),
    ],
)
def test_memory_that_makes_no_sense_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ps.CostError, match=message):
        initial_warmups(4, 12, **{"activation": 1, **options})


# -- Algorithm 2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("links", "num", "want"),
    [
        (ps.Links(), 12, (7, 5, 3, 1)),
        (late(0, 20), 12, (8, 5, 3, 1)),
        (late(2, 21), 30, (9, 7, 5, 1)),
        (late(0, 500), 12, (12, 5, 3, 1)),
        (ps.Links(), 4, (4, 4, 3, 1)),
        (ps.Links({(1, 2): 40.0, (2, 1): 0.0}), 12, (8, 6, 3, 1)),
    ],
)
def test_delays_are_given_the_slack_they_need(links: ps.Links, num: int, want: tuple[int, ...]) -> None:
    assert adapted_warmups(TEN, links, num) == want


def test_under_a_cap_the_link_with_most_to_spare_gives_way() -> None:
    assert adapted_warmups(TEN, late(0, 20), 12, max_in_flight=7) == (7, 4, 3, 1)
    assert adapted_warmups(TEN, late(0, 20), 12, max_in_flight=6) == (6, 3, 2, 1)
    assert adapted_warmups(TEN, late(0, 20), 12, max_in_flight=[12, 3, 3, 3]) == (6, 3, 2, 1)
    assert adapted_warmups(TEN, late(0, 20), 12, max_in_flight=1) == (1, 1, 1, 1)
    with pytest.raises(ps.CostError, match="max_in_flight of stage 0 is 0"):
        adapted_warmups(TEN, ps.Links(), 12, max_in_flight=0)


def test_a_stage_that_takes_no_time_needs_all_forwards_before_it() -> None:
    costs = ps.Costs(f=[1, 0], i=[1, 0], w=[1, 0])
    assert adapted_warmups(costs, ps.Links(), 5) == (5, 1)
    with pytest.raises(ps.CostError, match="stage 1 takes no time"):
        needed_slack(costs, 0, 1)


@settings(deadline=None, max_examples=examples(80))
@given(
    f=st.integers(1, 20),
    i=st.integers(1, 20),
    delays=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    cap=st.none() | st.integers(1, 40),
)
def test_adapted_counts_fall_and_absorb_what_they_can(f: int, i: int, delays: list[int], cap: int | None) -> None:
    costs = ps.Costs.uniform(len(delays) + 1, f=f, i=i, w=1)
    links = ps.Links({(s, s + 1): float(c) for s, c in enumerate(delays)})
    counts = adapted_warmups(costs, links, 1000, max_in_flight=cap)
    assert counts[-1] == 1
    assert all(a >= b for a, b in itertools.pairwise(counts))
    assert cap is None or counts[0] <= cap
    if cap is None or counts[0] < cap:
        for stage, (a, b) in enumerate(itertools.pairwise(counts)):
            assert a - b >= 2
            assert tolerance(costs, stage, a - b) >= delays[stage] - 1e-6


# -- The schedule, and the theorem ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "want"), [(0, 390), (10, 400), (20, 440)])
def test_the_papers_figures(delay: float, want: float) -> None:
    """Figures 4 and 5: the order was made without delay."""
    schedule = slow_link_schedule(TEN, 12, warmup=(7, 5, 3, 1))
    assert ps.simulate(schedule, TEN, links=late(0, delay)).makespan == want


@pytest.mark.parametrize("rule", ["priority", "alternate"])
@pytest.mark.parametrize("warmup", [(7, 5, 3, 1), None])
def test_made_with_the_delay_known_it_takes_410(rule: str, warmup: tuple[int, ...] | None) -> None:
    links = late(0, 20.0)
    schedule = slow_link_schedule(TEN, 12, links, warmup=warmup, rule=rule)
    assert ps.simulate(schedule, TEN, links=links).makespan == 410


def grown(schedule: ps.Schedule, costs: ps.Costs, links: ps.Links) -> float:
    return ps.simulate(schedule, costs, links=links).makespan - ps.simulate(schedule, costs).makespan


@pytest.mark.slow
@pytest.mark.parametrize("slack", [2, 3, 4, 5])
@pytest.mark.parametrize("link", [0, 1, 2])
def test_theorem_1_holds_in_strict_alternation(slack: int, link: int) -> None:
    """Up to (slack - 1) t a delay costs no more than its way there and back; past that it is paid every round."""
    num, t = 60, 10
    counts = [1 + slack * (3 - stage) for stage in range(4)]
    schedule = slow_link_schedule(TEN, num, warmup=counts, rule="alternate")
    threshold = (slack - 1) * t
    assert tolerances(schedule, TEN)[link, link + 1] == threshold
    for delay in range(0, threshold + 1):
        assert delay <= grown(schedule, TEN, late(link, delay)) <= 2 * delay
    past = [grown(schedule, TEN, late(link, float(threshold + extra))) for extra in (5, 10, 15)]
    slopes = [(b - a) / 5 for a, b in itertools.pairwise(past)]
    assert slopes[0] == slopes[1]
    if link == 2:
        assert slopes[0] == 2 * num / (slack + 1)
    # Rounds that the ramps at the ends take away; far from the N / (slack - 1) of the statement for slack > 2.
    assert 2 * (num - 3 * slack) / (slack + 1) - 2 <= slopes[0] <= 2 * num / (slack + 1)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40))
@given(
    f=st.integers(1, 20),
    i=st.integers(1, 20),
    delays=st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_delays_that_were_planned_for_do_not_add_up(f: int, i: int, delays: list[int]) -> None:
    """Whatever the number of microbatches, several late links cost their ways there and back, once."""
    costs = ps.Costs.uniform(len(delays) + 1, f=f, i=i, w=0)
    links = ps.Links({(s, s + 1): float(c) for s, c in enumerate(delays)})
    for num in (40, 80):
        counts = adapted_warmups(costs, links, num)
        schedule = slow_link_schedule(costs, num, warmup=counts, rule="alternate")
        assert grown(schedule, costs, links) <= 2 * sum(delays)


@pytest.mark.parametrize("rule", ["priority", "alternate"])
def test_memory_is_kept(rule: str) -> None:
    costs = ps.Costs(f=[10, 8, 12], i=[9, 11, 10], w=[7, 6, 9], activation=[3, 2, 4], freed_by_input=0.25)
    links = late(1, 30.0)
    for limit in (5, 8, [30, 8, 20]):
        schedule = slow_link_schedule(costs, 16, links, memory_limit=limit, rule=rule)
        ps.check(schedule)
        limits = [limit] * 3 if isinstance(limit, int) else limit
        peaks = ps.simulate(schedule, costs, links=links).peak_activations
        assert all(peak <= most for peak, most in zip(peaks, limits, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "fair"}, ps.ScheduleError, "rule 'fair': give 'priority' or 'alternate'"),
        ({"warmup": (1, 2, 1, 1)}, ps.ScheduleError, "never rise"),
        ({"warmup": (2, 1)}, ps.ScheduleError, "warmup has 2 counts; give one per stage, 4 in all"),
        ({"warmup": (7, 5, 3, 1), "memory_limit": 6}, ps.ScheduleError, "stage 0: 7 warm-up forwards are more"),
        ({"memory_limit": 0.5}, ps.CostError, "rank 0: memory_limit 0.5 has no room for one forward"),
        ({"links": ps.Links({(0, 9): 1.0})}, ps.CostError, "link 0:9"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        slow_link_schedule(TEN, 12, **options)
