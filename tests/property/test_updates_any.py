"""Updates in any schedule: Lemma 1 of AMDP, its bound whatever the times, and a second account of the check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
import reference
from penstock.formats import from_json, to_json
from tiers import examples

pytestmark = pytest.mark.property
QUICK = settings(deadline=None, max_examples=examples(60))
SOME = settings(deadline=None, max_examples=examples(25))
"""Where every example makes an order several ways."""


@st.composite
def amdp_schedules(draw: st.DrawFn, mismatch: tuple[int, int] = (0, 1)) -> tuple[ps.Schedule, int]:
    """Any even depth up to 12, even or uneven stages, windows, times of updates and messages."""
    d = 2 * draw(st.integers(1, 6))
    even = draw(st.booleans())
    ratio = draw(st.sampled_from([0.3, 1.0, 2.0, 2.5, 3.0, 5.0]))
    times = st.sampled_from([0.5, 1.0, 1.1, 4.0])
    f = draw(st.sampled_from([1.0, 1.5])) if even else draw(st.lists(times, min_size=d, max_size=d))
    schedule = ps.build(
        "amdp", d, draw(st.integers(1, 5 * d)), f=f,
        b=ratio if even else [ratio * x * draw(st.sampled_from([1.0, 1.3])) for x in f],
        u=draw(st.sampled_from([0.0, 0.5, 2.0, 9.0])), message=draw(st.sampled_from([0.0, 0.1, 3.0])),
        update_message=draw(st.sampled_from([0.0, 0.2, 7.0])),
        window=d * draw(st.integers(1, 3)), max_mismatch=draw(st.integers(*mismatch)),
    )  # fmt: skip
    return schedule, d


@QUICK
@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 10))
def test_lemma_1_of_one_pipeline_that_updates_after_every_backward(d: int, num_microbatches: int, n: int) -> None:
    schedule = ps.build("pipedream", d, num_microbatches, window=1, in_flight=n)
    found = ps.schedule.count_mismatch(schedule)
    # The first microbatches meet fewer: no update came before theirs.
    assert found == {(i, 0, m): min(m, min(n, d - i) - 1) for i in range(d) for m in range(num_microbatches)}
    ps.check(schedule, max_mismatch=min(n, d) - 1)
    if num_microbatches >= d and min(n, d) > 1:
        with pytest.raises(ps.ScheduleError, match="rule: mismatch"):
            ps.check(schedule, max_mismatch=min(n, d) - 2)


@QUICK
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 8))
def test_two_buffers_are_enough_where_a_window_is_no_shorter_than_the_pipeline(d: int, num: int, more: int) -> None:
    window = d + more
    found = ps.schedule.count_mismatch(ps.build("pipedream-2bw", d, num, window=window))
    for (i, _, m), between in found.items():
        # Those whose forward comes before the update of the window before theirs.
        assert between == (m >= window and m % window < d - 1 - i)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40))
@given(amdp_schedules())
def test_amdp_keeps_lemma_1_with_any_times_and_windows(built: tuple[ps.Schedule, int]) -> None:
    schedule, d = built
    updates = schedule.updates
    assert updates is not None
    n = (updates.max_mismatch or 0) + 1
    counted = ps.schedule.count_mismatch(schedule)
    assert counted == counted_again(schedule)
    for (stage, _, m), between in counted.items():
        assert between <= min(n, d - stage) - 1
        if m % updates.window >= d:
            assert between == 0


def counted_again(schedule: ps.Schedule) -> dict[tuple[int, int, int], int]:
    """The mismatch by the words of AMDP's section 3.1: the updates of a stage between a microbatch's F and its B."""
    num, found = schedule.placement.num_pipelines, {}
    for row in schedule.order:
        for end, (kind, stage, m) in enumerate(row):
            if kind == "B":
                between = row[row.index(ps.Op("F", stage, m)) : end]
                copies = [n % num for other, s, n in between if other == "U" and s == stage]
                found[stage, m % num, m] = copies.count(m % num)
    return found


@pytest.mark.slow
@SOME
@given(amdp_schedules(mismatch=(0, 3)))
def test_amdp_keeps_the_bound_it_is_given(built: tuple[ps.Schedule, int]) -> None:
    schedule, d = built
    updates = schedule.updates
    assert updates is not None
    assert updates.max_mismatch is not None
    for (_, _, m), between in ps.schedule.count_mismatch(schedule).items():
        assert between <= updates.max_mismatch
        assert not between or m % updates.window < d * updates.max_mismatch


@pytest.mark.slow
@SOME
@given(amdp_schedules())
def test_amdp_has_gradients_of_two_windows_under_way_at_most(built: tuple[ps.Schedule, int]) -> None:
    schedule, _ = built
    windows = schedule.windows
    assert windows is not None
    for row in schedule.order:
        taken: dict[tuple[int, int], int] = {}
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            if op.kind == "U":
                assert windows.update_of(op.microbatch)[0] == taken.get(copy, 0)
                taken[copy] = taken.get(copy, 0) + 1
            elif op.kind == "B":
                assert op.microbatch // windows.window - taken.get(copy, 0) <= 1


@pytest.mark.slow
@SOME
@given(amdp_schedules())
def test_schedules_with_updates_come_back_from_text_and_json(built: tuple[ps.Schedule, int]) -> None:
    schedule, _ = built
    assert ps.parse(str(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.slow
@SOME
@given(amdp_schedules(), st.data())
def test_no_dispatch_or_delay_carries_an_op_across_an_update_of_its_stage(
    built: tuple[ps.Schedule, int], data: st.DataObject
) -> None:
    schedule, d = built
    times = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=d, max_size=d)
    costs = ps.Costs(data.draw(times), data.draw(times), data.draw(times), other={"U": 0.7})
    links = ps.Links({(a, b): data.draw(st.sampled_from([0.0, 4.0])) for a in range(d) for b in range(a)})
    frozen = ps.simulate(schedule, costs, links=links)
    assert frozen.executed() == schedule
    ran = ps.simulate(schedule, costs, links=links, dispatch="dynamic").executed()
    ps.check(ran)
    assert versions(ran) == versions(schedule)


@pytest.mark.slow
@SOME
@given(amdp_schedules(), st.data())
def test_check_and_a_second_account_agree_on_updates_out_of_place(
    built: tuple[ps.Schedule, int], data: st.DataObject
) -> None:
    schedule, _ = built
    spots = [(r, s) for r, row in enumerate(schedule.order) for s, op in enumerate(row) if op.kind == "U"]
    rank, step = data.draw(st.sampled_from(spots))
    row = list(schedule.order[rank])
    op = row.pop(step)
    row.insert(data.draw(st.integers(0, len(row))), op)
    rows = [*schedule.order[:rank], tuple(row), *schedule.order[rank + 1 :]]
    changed = replace(
        schedule, order=tuple(rows), updates=ps.schedule.Updates(schedule.updates.window if schedule.updates else 1)
    )
    refused = reference.refusal(changed)
    assert refused is None or refused.rule in ("order", "deadlock")
    assert (refused is None) == completes(changed)


def versions(schedule: ps.Schedule) -> dict[ps.Op, int]:
    """How many updates of its copy come before each op."""
    found = {}
    for row in schedule.order:
        taken: dict[tuple[int, int], int] = {}
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            found[op] = taken.get(copy, 0)
            taken[copy] = found[op] + (op.kind == "U")
    return found


def completes(schedule: ps.Schedule) -> bool:
    """Runs the rows by rules written down here once more, rank by rank until nothing moves."""
    num, last = schedule.num_microbatches, schedule.num_stages - 1
    num_pipelines, window = schedule.placement.num_pipelines, schedule.updates.window if schedule.updates else 1
    done: set[ps.Op] = set()

    def may_run(op: ps.Op) -> bool:
        kind, s, m = op
        if kind == "F":
            return s == 0 or ps.Op("F", s - 1, m) in done
        if kind == "B":
            return ps.Op("F", s, m) in done and (s == last or ps.Op("B", s + 1, m) in done)
        update, pipeline = m // num_pipelines, m % num_pipelines
        if update and ps.Op("U", s, m - num_pipelines) not in done:
            return False
        if pipeline:
            return ps.Op("U", s, m - pipeline) in done
        return all(ps.Op("B", s, k) in done for k in range(num) if k // window == update)

    steps = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.order):
            while steps[rank] < len(row) and may_run(row[steps[rank]]):
                done.add(row[steps[rank]])
                steps[rank] += 1
                moved = True
    return all(step == len(row) for step, row in zip(steps, schedule.order, strict=True))
