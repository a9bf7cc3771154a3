"""AMDP's order: how busy it keeps ranks over even and uneven stages, late messages and timed updates."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.schedule import peak_in_flight
from penstock.schedule.placement import multi_directional
from penstock.schedule.weight_versions import updates_ahead

pytestmark = pytest.mark.unit


def busy(schedule: ps.Schedule, costs: ps.Costs, message: float = 0.0) -> float:
    return 1 - ps.simulate(schedule, costs, links=ps.Links(default=message)).bubble_ratio


def gpt(d: int, last: float) -> ps.Costs:
    """48 blocks over d stages, with a head besides that is worth so many blocks."""
    times = [48 / d] * (d - 1) + [48 / d + last]
    return ps.Costs(times, times, times)


def busiest_rank(costs: ps.Costs, num_microbatches: int) -> float:
    d = costs.num_stages
    load = [0.0] * d
    for k, ranks in enumerate(multi_directional(d).pipelines):
        for stage, rank in enumerate(ranks):
            load[rank] += len(range(k, num_microbatches, d // 2)) * (costs.f[stage] + costs.b[stage])
    return max(load)


@pytest.mark.slow
@pytest.mark.parametrize("d", [4, 8])
@pytest.mark.parametrize("windows", [1, 2])
def test_updates_leave_ranks_as_busy_as_they_were(d: int, windows: int) -> None:
    costs = ps.Costs.uniform(d, b=2.0)
    plain, updated = (busy(ps.build("amdp", d, 24 * d, window=w), costs) for w in (None, windows * d))
    assert updated >= plain - 0.011
    assert updated > 0.97


@pytest.mark.parametrize(("d", "blocks"), [(4, 2), (8, 1), (8, 2)])
@pytest.mark.parametrize("u", [0.25, 4.0])
def test_all_ranks_update_at_once_so_that_an_update_costs_its_time_once(d: int, blocks: int, u: float) -> None:
    schedule = ps.build("amdp", d, 12 * d, window=blocks * d)
    plain = ps.Costs.uniform(d, b=2.0)
    timed = plain.with_other({("U", stage): u for stage in range(d)})
    cost = ps.simulate(schedule, timed).makespan - ps.simulate(schedule, plain).makespan
    num_updates = 12 // blocks
    assert num_updates * u <= cost + 1e-9
    assert cost <= 1.3 * num_updates * u  # a slot before a forward that must not miss it may come a little sooner
    starts: dict[int, set[float]] = {}
    for t in ps.simulate(schedule, plain).ops:
        if t.op.kind == "U" and schedule.pipeline_of(t.op) == 0:
            starts.setdefault(t.op.microbatch, set()).add(t.start)
    apart = [max(times) - min(times) for times in list(starts.values())[:-1]]
    assert max(apart) <= 3.0  # each before the op that starts next on its rank


@pytest.mark.parametrize("d", [4, 8])
def test_uneven_stages_are_ordered_by_their_own_times(d: int) -> None:
    costs, num = gpt(d, 4.7), 12 * d
    least = busiest_rank(costs, num)
    by_stage = ps.simulate(ps.build("amdp", d, num, window=2 * d, f=costs.f, b=costs.b), costs).makespan
    alike = ps.simulate(ps.build("amdp", d, num, window=2 * d), costs).makespan
    assert least < by_stage <= alike
    assert by_stage < 1.02 * least


def test_times_of_a_balanced_model_gain_most() -> None:
    """48 blocks and a head of 4.7 as even as they go: enough to throw the pattern of even times out."""
    times = [6.0] * 3 + [7.0] * 4 + [6.7]
    costs, num = ps.Costs(times, times, times), 96
    by_stage, alike = (
        ps.simulate(ps.build("amdp", 8, num, window=16, **made_by), costs).makespan
        for made_by in ({"f": costs.f, "b": costs.b}, {})
    )
    assert by_stage < 0.99 * alike
    assert by_stage < 1.02 * busiest_rank(costs, num)


@pytest.mark.parametrize("b", [1.0, 2.0])
@pytest.mark.parametrize("window", [None, 16])
def test_an_order_made_for_late_messages_is_busier_under_them(b: float, window: int | None) -> None:
    costs = ps.Costs.uniform(8, b=b)
    made = ps.build("amdp", 8, 96, b=b, window=window, message=0.1, update_message=0.1 if window else 0.0)
    without = ps.build("amdp", 8, 96, b=b, window=window)
    assert busy(made, costs, 0.1) > busy(without, costs, 0.1) + 0.02
    assert busy(made, costs, 0.1) > 0.94


@pytest.mark.parametrize("b", [1.5, 1.9, 2.1, 2.5])
def test_ratios_that_are_no_whole_numbers_are_read_ahead_for_too(b: float) -> None:
    schedule = ps.build("amdp", 8, 96, b=b, window=32)
    assert busy(schedule, ps.Costs.uniform(8, b=b)) > 0.95
    assert max(peak_in_flight(schedule)) <= 16


@pytest.mark.parametrize("window", [None, 2, 8])
def test_two_ranks_are_one_pipeline_that_reads_ahead(window: int | None) -> None:
    schedule = ps.build("amdp", 2, 80, window=window)
    assert schedule.placement.pipelines == ((0, 1),)
    assert busy(schedule, ps.Costs.uniform(2, b=2.0)) > 0.97


def unknown(schedule: ps.Schedule) -> int:
    """Backwards of the window before that a late forward's PREDICT doesn't know, summed over late forwards."""
    windows, known, found = schedule.windows, ps.schedule.known_to(schedule), 0
    assert windows is not None
    for stage in range(schedule.num_stages):
        for m, ahead in updates_ahead(schedule, stage).items():
            if ahead:
                found += windows.window - len(known.get((stage, m // windows.window - 1), ()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("d", "blocks"), [(4, 4), (8, 1), (8, 4)])
def test_tentative_updates_take_the_order_that_misses_least_among_equally_fast_ones(d: int, blocks: int) -> None:
    costs, num, window = ps.Costs.uniform(d, i=1.0, w=1.0), 32 * d, blocks * d
    plain = ps.build("amdp", d, num, window=window)
    chosen = ps.build("amdp", d, num, window=window, rule="tentative")
    same = ps.schedule.with_tentative_updates(
        plain, lambda op: {"F": 1.0, "B": 2.0, "PREDICT": 2.0}.get(op.kind, 0), 1.0
    )
    assert ps.simulate(chosen, costs).makespan <= ps.simulate(plain, costs).makespan
    assert unknown(chosen) <= unknown(same)
    if (d, blocks) == (4, 4):
        assert unknown(chosen) < unknown(same)


def test_a_tentative_update_before_its_late_forwards_holds_no_rank_up() -> None:
    """PREDICT takes a quarter of a forward: less than its own time a window is lost, where each is there in time."""
    d, window, predict = 8, 32, 0.25
    costs = ps.Costs.uniform(d, i=1.0, w=1.0).with_other({("PREDICT", stage): predict for stage in range(d)})
    plain = ps.build("amdp", d, 8 * window, window=window)
    least = ps.simulate(plain, costs).makespan
    late = ps.simulate(ps.schedule.with_tentative_updates(plain), costs).makespan - least
    lead = ps.simulate(ps.build("amdp", d, 8 * window, window=window, rule="tentative"), costs).makespan - least
    assert lead < late
    assert lead <= 2 * 7 * predict


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"f": [1.0, 2.0]}, "f has 2 times; give one number, or one per stage: 4"),
        ({"b": [1.0, 2.0, 0.0, 1.0]}, r"b is \[1.0, 2.0, 0.0, 1.0\]; give a time above 0"),
        ({"f": 0}, "f is 0; give a time above 0"),
        ({"b": float("nan")}, "b is nan; give a time above 0"),
        ({"u": [-1.0] * 4}, "give a time of at least 0"),
        ({"message": -0.1}, "message is -0.1; give a time of at least 0"),
        ({"update_message": "fast"}, "update_message is 'fast'; give a time of at least 0"),
    ],
)
def test_times_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ps.ScheduleError, match=message):
        ps.build("amdp", 4, 12, **options)
