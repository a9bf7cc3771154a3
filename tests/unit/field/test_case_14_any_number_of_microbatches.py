"""Case 14: interleaved 1F1B with a number of microbatches that is no multiple of the ranks (pytorch#129597)."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.schedule import peak_in_flight


def makespan(schedule: ps.Schedule) -> float:
    whole = not schedule.splits_backward()
    return ps.simulate(schedule, ps.Costs.uniform(schedule.num_stages, b=2.0 if whole else 1.0)).makespan


def interleaved(p: int, n: int, v: int, **options: Any) -> ps.Schedule:
    return ps.build("interleaved-1f1b", p, n, num_stages=v * p, **options)


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_interleaved_runs_any_number_of_microbatches(p: int, v: int) -> None:
    for n in range(1, 3 * p):
        schedule, whole = interleaved(p, n, v), interleaved(p, -(-n // p) * p, v)
        ps.check(schedule)
        assert schedule.num_microbatches == n
        assert makespan(schedule) <= makespan(whole)
        if n < p:
            assert makespan(schedule) == 3 * (v * n + p - 1 + (v - 1) * (p - n))
        elif 2 * (n % p) <= p:
            assert makespan(schedule) == 3 * (v * n + p - 1), "the bubble is that of multiples"


@pytest.mark.parametrize("backward", ["whole", "split"])
def test_what_a_rank_holds_is_as_documented(backward: str) -> None:
    for p, v in ((2, 2), (4, 2), (4, 3), (8, 2)):
        for n in range(1, 3 * p):
            g = -(-n // max(1, n // p)) if 2 * (n % p) <= p or n < p else p
            most = 2 * (p - 1) + (v - 1) * g + 1 if backward == "whole" else (v - 1) * g + p
            schedule = interleaved(p, n, v, backward=backward)
            assert max(peak_in_flight(schedule)) <= min(v * n, most), (p, v, n)


@pytest.mark.parametrize("name", [name for name in ps.library.SCHEDULES if name != "distmm"])
def test_no_schedule_refuses_a_number_of_microbatches(name: str) -> None:
    for n in range(1, 10):
        ps.check(ps.build(name, 4, n))


@pytest.mark.parametrize("overlap", [False, True])
def test_dualpipe_takes_odd_and_small_numbers(overlap: bool) -> None:
    for name, n, whole in (("dualpipe", 9, 10), ("dualpipe", 3, 8), ("dualpipe-v", 5, 8)):
        schedule, next_one = (ps.build(name, 4, each, overlap=overlap) for each in (n, whole))
        assert makespan(schedule) <= makespan(next_one)
        assert all(a <= b for a, b in zip(peak_in_flight(schedule), peak_in_flight(next_one), strict=True))
    assert ps.build("dualpipe", 4, 9).microbatch_pipeline == (0, 1, 0, 1, 0, 1, 0, 1, 0)
