"""Every library schedule against its formulas: bubble, span and peak, for many ranks and microbatches."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.schedule import peak_in_flight
from tiers import others_nightly

pytestmark = pytest.mark.unit

RANKS = others_nightly(range(1, 9), (1, 2, 3, 5, 8))
MICROBATCHES = others_nightly((1, 2, 3, 5, 8, 12, 17, 24), (1, 3, 8, 17))
TIMES = ((1, 1, 1), (2, 3, 1), (10, 20, 10), (5, 7, 5), (1, 2, 3))
"""f, i, w of a stage; the last has a w longer than f and i."""


def timed(schedule: ps.Schedule, f: float, i: float, w: float) -> ps.Timeline:
    return ps.simulate(schedule, ps.Costs.uniform(schedule.num_stages, f, i, w))


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", MICROBATCHES)
def test_gpipe(p: int, n: int) -> None:
    schedule = ps.build("gpipe", p, n)
    for f, i, w in TIMES:
        assert timed(schedule, f, i, w).makespan == (n + p - 1) * (f + i + w)
    assert peak_in_flight(schedule) == (n,) * p


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", MICROBATCHES)
def test_1f1b(p: int, n: int) -> None:
    schedule = ps.build("1f1b", p, n)
    for f, i, w in TIMES:
        timeline = timed(schedule, f, i, w)
        assert timeline.makespan == (n + p - 1) * (f + i + w)
        assert timeline.bubble_ratio == pytest.approx((p - 1) / (n + p - 1))
    assert peak_in_flight(schedule) == tuple(min(p - rank, n) for rank in range(p))


@pytest.mark.parametrize("p", others_nightly(range(1, 7), (1, 2, 3, 5)))
@pytest.mark.parametrize("v", others_nightly([1, 2, 3, 4], [1, 3]))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_interleaved(p: int, v: int, groups: int) -> None:
    n = groups * p
    schedule = ps.build("interleaved-1f1b", p, n, num_stages=v * p)
    for f, i, w in TIMES:
        assert timed(schedule, f, i, w).makespan == (n * v + p - 1) * (f + i + w)
    expected = tuple(min(2 * (p - 1 - rank) + (v - 1) * p + 1, n * v) for rank in range(p))
    assert peak_in_flight(schedule) == expected


@pytest.mark.parametrize("p", others_nightly(range(1, 7), (1, 2, 3, 5)))
@pytest.mark.parametrize("v", others_nightly([1, 2, 3, 4], [1, 3]))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_interleaved_with_split_backwards_is_zb_h1_over_more_stages(p: int, v: int, groups: int) -> None:
    n = groups * p
    schedule = ps.build("interleaved-1f1b", p, n, num_stages=v * p, backward="split")
    for f, i, w in TIMES[:-1]:
        assert timed(schedule, f, i, w).makespan == n * v * (f + i + w) + (p - 1) * (f + i - w)
    assert peak_in_flight(schedule) == (v * p,) * p
    if v == 1:
        assert schedule.order == ps.build("zb-h1", p, n).order


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", MICROBATCHES)
def test_zb_h1(p: int, n: int) -> None:
    schedule = ps.build("zb-h1", p, n)
    for f, i, w in TIMES[:-1]:
        late = max(p - n, 0)  # with fewer microbatches than ranks there are not enough W to fill the bubbles
        assert timed(schedule, f, i, w).makespan == n * (f + i + w) + (p - 1) * (f + i - w) + late * w
    assert max(peak_in_flight(schedule)) == min(p, n)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", MICROBATCHES)
def test_zb_h2(p: int, n: int) -> None:
    schedule = ps.build("zb-h2", p, n)
    timeline = timed(schedule, 1, 1, 1)
    assert timeline.makespan == 3 * n + p - 1 + max(0, p - n)
    assert max(peak_in_flight(schedule)) == min(2 * p - 1, n)
    if n >= 2 * p - 1:
        assert timeline.span == 3 * n
    assert schedule.max_in_flight == 2 * p - 1


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", MICROBATCHES)
def test_zb_v(p: int, n: int) -> None:
    schedule = ps.build("zb-v", p, n)
    timeline = timed(schedule, 1, 1, 1)
    assert max(peak_in_flight(schedule)) == 2 * min(p, n)
    if n >= 2 * p - 1:
        assert timeline.span == 6 * n
        assert timeline.makespan == 6 * n + p - 1
        assert peak_in_flight(schedule) == (2 * p,) * p


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", MICROBATCHES)
def test_zb_runs_its_warmup_first(p: int, n: int) -> None:
    schedule = ps.build("zb", p, n)
    for rank, row in enumerate(schedule.order):
        first_backward = next(step for step, op in enumerate(row) if op.kind == "I")
        assert first_backward >= min(2 * (p - rank) - 1, n)


def test_zb_keeps_what_may_be_in_flight() -> None:
    free = ps.build("zb", 4, 12, warmup=[4, 3, 2, 1])
    tight = ps.build("zb", 4, 12, warmup=[4, 3, 2, 1], max_in_flight=4)
    assert max(peak_in_flight(free)) > 4
    assert max(peak_in_flight(tight)) == 4
    assert tight.max_in_flight == 4


@pytest.mark.parametrize("warmup", [[12, 8, 4, 1], [12, 1, 1, 1], [8, 4, 2, 1], [40, 20, 10, 5]])
def test_zb_may_have_any_slack(warmup: list[int]) -> None:
    schedule = ps.build("zb", 4, 12, warmup=warmup)
    timeline = ps.simulate(schedule, links=ps.Links({(0, 1): 7.0}), dispatch="dynamic")
    assert len(timeline.ops) == schedule.num_ops


@pytest.mark.parametrize("name", ["1f1b", "zb", "interleaved-1f1b", "amdp"])
def test_bug_a_hundred_billion_microbatches_were_counted_out_one_by_one(name: str) -> None:
    with pytest.raises(ps.ScheduleError, match="at most 10000000; give at most 2500000 microbatches"):
        ps.build(name, 4, 10**11)
    with pytest.raises(ps.ScheduleError, match=r"with 10000000000 stages and 4 microbatches .* give fewer stages"):
        ps.build(name, 10**10, 4)


@pytest.mark.parametrize("name", ps.library.SCHEDULES)
@pytest.mark.parametrize(("p", "n", "what"), [(0, 4, "ranks"), (4, 0, "microbatches"), (-1, 4, "ranks")])
def test_counts_are_at_least_one(name: str, p: int, n: int, what: str) -> None:
    with pytest.raises(ps.ScheduleError, match=f"{name} needs at least 1 of {what}, got"):
        ps.build(name, p, n)


def test_a_limit_that_a_fixed_schedule_does_not_meet() -> None:
    with pytest.raises(ps.ScheduleError, match="the rank would hold 4 stage activations, the limit is 3") as caught:
        ps.build("1f1b", 4, 12, max_in_flight=3)
    assert caught.value.rule == "memory"
