"""Schedules as text and JSON come back equal, and nothing but ScheduleError comes out of what is no schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
import reference
from penstock.formats import from_json, to_json
from penstock.schedule import needed_channel_depth, peak_in_flight
from strategies import any_schedules, library_schedules
from tiers import examples

pytestmark = pytest.mark.property

QUICK = settings(deadline=None, max_examples=examples(150))


@pytest.mark.slow
@QUICK
@given(any_schedules())
def test_any_schedule_parses_back_from_its_text(schedule: ps.Schedule) -> None:
    if schedule.placement.num_pipelines == 1 or schedule.num_microbatches:
        assert ps.parse(str(schedule)) == schedule


@pytest.mark.slow
@QUICK
@given(any_schedules())
def test_any_schedule_loads_back_from_its_json(schedule: ps.Schedule) -> None:
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.slow
@QUICK
@given(any_schedules())
def test_check_of_anything_ends_in_a_verdict_the_reference_shares(schedule: ps.Schedule) -> None:
    error = reference.refusal(schedule)
    assert (error is None) == (schedule.num_microbatches > 0 and reference.is_valid(schedule)), error


@QUICK
@given(library_schedules())
def test_library_schedules_are_valid_by_both_accounts(schedule: ps.Schedule) -> None:
    ps.check(schedule)
    assert reference.is_valid(schedule)
    assert list(peak_in_flight(schedule)) == reference.in_flight(schedule)
    if schedule.max_in_flight is not None:
        assert max(peak_in_flight(schedule)) <= schedule.max_in_flight


@QUICK
@given(library_schedules())
def test_the_needed_channel_depth_is_the_smallest(schedule: ps.Schedule) -> None:
    depth = needed_channel_depth(schedule)
    assert reference.run(schedule, depth) == schedule.num_ops
    if depth > 1:
        assert reference.run(schedule, depth - 1) != schedule.num_ops


def test_save_and_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("saved")

    @settings(deadline=None, max_examples=examples(40))
    @given(library_schedules(), st.sampled_from(["s.json", "s.txt"]))
    def there_and_back(schedule: ps.Schedule, name: str) -> None:
        ps.save(schedule, folder / name)
        assert ps.load(folder / name) == schedule

    there_and_back()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["0F0", "1B1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("format", "version", "name", "placement", "microbatch_pipeline", "memory_limit", "order")


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(400))
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, min_size=1, max_size=3))
def test_json_of_the_wrong_shape_is_a_schedule_error_and_nothing_else(wrong: dict[str, Any]) -> None:
    value = json.loads(to_json(ps.build("zb-v", 2, 3))) | wrong
    try:
        schedule = from_json(json.dumps(value))
    except ps.ScheduleError:
        return
    reference.refusal(schedule)  # what was read is a schedule value, so `check` has a verdict


@settings(deadline=None, max_examples=examples(200))
@given(JSON_VALUES)
def test_json_of_anything(value: Any) -> None:
    with pytest.raises(ps.ScheduleError):
        from_json(json.dumps(value))


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(300))
@given(library_schedules(3, 4), st.data())
def test_text_with_a_slip_is_a_schedule_error_and_nothing_else(schedule: ps.Schedule, data: st.DataObject) -> None:
    text = str(schedule)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 3))
        text = text[:at] + data.draw(st.text("0123456789FBIW.|:,\n xé", max_size=3)) + text[at + length :]
    try:
        other = ps.parse(text)
    except ps.ScheduleError:
        return
    reference.refusal(other)
