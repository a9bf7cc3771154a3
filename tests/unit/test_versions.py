"""How many versions of the weights copies hold by each rule, counted and drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.schedule import RULES

pytestmark = pytest.mark.unit


def by_stage(schedule: ps.Schedule) -> list[int]:
    found = ps.schedule.count_versions(schedule)
    assert set(found) == {(s, k) for s in range(schedule.num_stages) for k in range(schedule.placement.num_pipelines)}
    return [found[stage, 0] for stage in range(schedule.num_stages)]


@pytest.mark.parametrize("rule", ["pipedream", "vnag"])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_stashing_keeps_one_version_for_each_microbatch_in_flight(rule: str, p: int) -> None:
    schedule = ps.build(rule, p, 4 * p, window=1)
    assert by_stage(schedule) == [p - stage for stage in range(p)]


@pytest.mark.parametrize(
    ("window", "versions"), [(1, [4, 3, 2, 1]), (2, [3, 2, 2, 1]), (3, [2, 2, 2, 1]), (9, [2, 2, 2, 1])]
)
def test_longer_windows_need_fewer_versions(window: int, versions: list[int]) -> None:
    assert by_stage(ps.build("pipedream", 4, 30, window=window)) == versions


def test_versions_of_a_drawn_schedule() -> None:
    text = """
        schedule mine: 1 rank, 2 stages, 3 microbatches
        pipeline 0: stages on ranks 0 0
        updates every 1 microbatch, weights by {rule}
        rank 0 | 0F0 0F1 1F0 1B0 1U0 0B0 0U0 0F2 1F1 1F2 1I1 1W1 1U1 0I1 0W1 0U1 1B2 1U2 0B2 0U2
    """
    # Stage 0: after U0 microbatch 1 is in flight with version 0 (2); after U1 microbatch 2 with 1 (2); then none.
    # Stage 1: microbatch 2 is read with version 1 and still in flight after U1 (2).
    expected = {"none": [1, 1], "spectrain": [2, 1]}  # SpecTrain predicts nothing on the last of two stages
    for rule in RULES:
        schedule = ps.parse(text.format(rule=rule))
        ps.check(schedule)
        assert by_stage(schedule) == expected.get(rule, [2, 2])
    one = ps.parse("""
        schedule mine: 1 rank, 1 stage, 2 microbatches
        pipeline 0: stages on ranks 0
        updates every 1 microbatch, weights by pipedream
        rank 0 | F0 B0 U0 F1 B1 U1
    """)
    assert by_stage(one) == [1]


def test_without_rule_or_updates_there_is_one_version_of_every_copy() -> None:
    for schedule in (ps.build("amdp", 4, 16, window=8), ps.build("chimera", 4, 8), ps.build("pipedream", 4, 8)):
        assert set(ps.schedule.count_versions(schedule).values()) == {1}


def test_copies_without_the_optimizers_state_hold_what_they_are_sent() -> None:
    amdp = ps.build("amdp", 4, 16, window=4)
    assert amdp.updates is not None
    predicting = replace(amdp, updates=replace(amdp.updates, rule="xpipe"))
    alone = ps.schedule.count_versions(predicting)
    assert set(alone.values()) == {2}
    copies = ps.schedule.count_versions(predicting, sharding="copies")
    assert copies == {(stage, k): 3 if k else 2 for stage, k in alone}
    for sharding in ("zero1", "fsdp"):
        assert ps.schedule.count_versions(predicting, sharding=sharding) == copies
        in_parts = ps.schedule.count_versions(predicting, sharding=sharding, num_replicas=2)
        assert set(in_parts.values()) == {3}
        assert set(ps.schedule.count_versions(amdp, sharding=sharding, num_replicas=2).values()) == {1}
    with pytest.raises(ps.ScheduleError, match="no sharding 'zero'; choose none, copies, zero1, fsdp"):
        ps.schedule.count_versions(predicting, sharding="zero")


@pytest.mark.parametrize("p", [2, 3, 5])
def test_two_buffers_are_refused_where_windows_are_too_short(p: int) -> None:
    """The shortest is p - 1: rank 0 lets p microbatches in, and the first of window 2 must not come before U0."""
    order = ps.build("1f1b", p, 8 * p)
    for window in range(1, 2 * p):
        schedule = ps.schedule.with_updates(order, window, rule="pipedream-2bw")
        if window >= p - 1:
            ps.check(schedule)
            continue
        with pytest.raises(ps.ScheduleError) as caught:
            ps.check(schedule)
        error = caught.value
        assert error.rule == "versions"
        assert error.op == ps.Op("F", 0, 2 * window)
        assert schedule.order[0][error.step or 0] == error.op
        assert f"by the rule pipedream-2bw microbatch {2 * window}, of window 2, reads what update 0" in str(error)
        assert f"Give windows of at least {p - 1} (rule: versions)" in str(error)


def test_two_buffers_with_gpipe_need_half_of_all_microbatches() -> None:
    order = ps.build("gpipe", 2, 8)
    ps.check(ps.schedule.with_updates(order, 4, rule="pipedream-2bw"))
    with pytest.raises(ps.ScheduleError, match=r"Give windows of at least 4 \(rule: versions\)"):
        ps.check(ps.schedule.with_updates(order, 3, rule="pipedream-2bw"))
