"""Synchronous schedules window after window: the same ops, no mismatch, and no barrier between windows."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.library import ASYNCHRONOUS
from penstock.passes import add_communication, recompute
from penstock.schedule import peak_in_flight
from tiers import others_nightly

pytestmark = pytest.mark.unit
SYNCHRONOUS = [name for name in ps.library.SCHEDULES if name not in ASYNCHRONOUS]


def windows_of(schedule: ps.Schedule, rank: int) -> list[list[ps.Op]]:
    """A rank's ops but updates, by the window of their microbatch (or of their number, where registered)."""
    windows = schedule.windows
    assert windows is not None
    found: list[list[ps.Op]] = [[] for _ in range(windows.num_updates)]
    for op in schedule.order[rank]:
        registered = schedule.graph.registered_of.get((op.kind, op.stage))
        each = registered.num_ops // windows.num_updates if registered else windows.window
        if op.kind != "U":
            found[op.microbatch // each].append(op._replace(microbatch=op.microbatch % each))
    return found


@pytest.mark.parametrize("num_microbatches", others_nightly([8, 16], [8]))
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_window_is_the_schedule_and_meets_no_update(name: str, num_microbatches: int) -> None:
    schedule = ps.build(name, 4, num_microbatches)
    repeated = ps.passes.repeat_windows(schedule, 3)
    assert repeated.updates == ps.schedule.Updates(num_microbatches, 0)
    assert set(ps.schedule.count_mismatch(repeated).values()) == {0}
    assert repeated.num_microbatches == 3 * num_microbatches
    assert peak_in_flight(repeated) == peak_in_flight(schedule)
    for rank, row in enumerate(schedule.order):
        assert windows_of(repeated, rank) == [list(row)] * 3
    updates = {op for row in repeated.order for op in row if op.kind == "U"}
    assert len(updates) == 3 * schedule.num_stages * schedule.placement.num_pipelines
    costs = ps.Costs.uniform(schedule.num_stages, freed_by_input=0.0)
    for dispatch in ("frozen", "dynamic"):
        ran = ps.simulate(repeated, costs, dispatch=dispatch)
        ps.check(ran.executed(), max_mismatch=0)
        _no_forward_before_its_update(ran)


def _no_forward_before_its_update(ran: ps.Timeline) -> None:
    """A second account, by times: forwards of window r start when update r - 1 of their copy has ended."""
    schedule, windows = ran.schedule, ran.schedule.windows
    assert windows is not None
    end = {t.op: t.end for t in ran.ops}
    for t in ran.ops:
        if t.op.kind == "F" and t.op.microbatch >= windows.window:
            update = t.op.microbatch // windows.window - 1
            number = windows.number(update, schedule.microbatch_pipeline[t.op.microbatch])
            assert end[ps.Op("U", t.op.stage, number)] <= t.start
    for op, ended in end.items():
        if op.kind == "U":
            window = windows.microbatches(windows.update_of(op.microbatch)[0])
            assert all(end[b] <= ended for m in window for k in "BW" if (b := ps.Op(k, op.stage, m)) in end)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_zero_bubble_schedules_follow_one_another_without_a_bubble(name: str) -> None:
    """Where f = i = w. A step alone takes longer by what its ranks wait at its ends."""
    schedule = ps.build(name, 4, 12)
    costs = ps.Costs.uniform(schedule.num_stages)
    busy = sum(ps.simulate(schedule, costs).busy) / 4
    times = [ps.simulate(ps.passes.repeat_windows(schedule, num), costs).makespan for num in (1, 2, 5, 9)]
    assert times[0] > busy
    assert [t - times[0] for t in times] == [0, busy, 4 * busy, 8 * busy]


def test_owners_update_at_the_end_of_a_window_and_copies_before_their_next_forward() -> None:
    assert str(ps.passes.repeat_windows(ps.build("chimera", 2, 2), 2)).splitlines()[3:] == [
        "updates every 2 microbatches, mismatch at most 0",
        "rank 0 | 0F0 1F1 1B1 0B0 0U0 0F2 1U1 1F3 1B3 0B2 0U2 1U3",
        "rank 1 | 0F1 1F0 1B0 0B1 1U0 0U1 0F3 1F2 1B2 0B3 1U2 0U3",
    ]


def test_pipelines_without_microbatches_take_updates_over_too() -> None:
    repeated = ps.passes.repeat_windows(ps.build("chimera", 4, 1), 3)
    assert sum(op.kind == "U" for row in repeated.order for op in row) == 3 * 4 * 2


def test_timed_updates_run_where_ranks_stand_idle_at_the_end() -> None:
    schedule = ps.build("zb-v", 4, 8)
    costs = replace(ps.Costs.uniform(8), other={"U": 2.0})
    plain, timed = (
        ps.simulate(ps.passes.repeat_windows(schedule, 6), c).makespan for c in (ps.Costs.uniform(8), costs)
    )
    assert timed <= plain + 6 * 2 * 2.0  # two stages a rank, one after the other: no rank waits for another's


def test_recomputed_and_separated_schedules_are_repeated_too() -> None:
    schedule = recompute(ps.build("gpipe", 2, 4), ps.Costs.uniform(2), memory_limit=3)
    repeated = ps.passes.repeat_windows(schedule, 2)
    assert sum(op.kind == "R" for row in repeated.order for op in row) == 2 * sum(
        op.kind == "R" for row in schedule.order for op in row
    )


def test_what_is_not_repeated_says_so() -> None:
    plain = ps.build("1f1b", 2, 4)
    for num in (0, -1, 1.5, True):
        with pytest.raises(ps.ScheduleError, match="give a whole number from 1"):
            ps.passes.repeat_windows(plain, num)  # type: ignore[arg-type]
    with pytest.raises(ps.ScheduleError, match="has updates as ops"):
        ps.passes.repeat_windows(ps.passes.repeat_windows(plain, 2), 2)
    with pytest.raises(ps.ScheduleError, match="has messages as ops, which are not repeated"):
        ps.passes.repeat_windows(add_communication(plain), 2)
    own = replace(plain, stage_graph=ps.schedule.StageGraph(2, ((0, 1),), (4, 2)))
    with pytest.raises(ps.ScheduleError):
        ps.passes.repeat_windows(own, 2)
