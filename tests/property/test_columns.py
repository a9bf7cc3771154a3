"""What is asked of a schedule's columns, all ops at once, is what going through its ops one by one says."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.dispatch import lower
from penstock.library.registry import SCHEDULES
from penstock.schedule import Op, Schedule
from recomputed import with_recompute

PLAIN = [name for name in SCHEDULES if name not in ("mllm", "distmm", "pipedream-2bw", "amdp")]


def op_by_op(schedule: Schedule) -> Schedule:
    """The same without its columns."""
    found = replace(schedule)
    found.__dict__["columns"] = None
    return found


def said(schedule: Schedule, **options: Any) -> str:
    try:
        ps.check(schedule, **options)
    except ps.ScheduleError as error:
        return str(error)
    return "valid"


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(PLAIN))
    ranks = draw(st.sampled_from([2, 4]))
    try:
        schedule = ps.build(name, ranks, draw(st.sampled_from([ranks, 2 * ranks, 2 * ranks + 1])))
    except ps.ScheduleError:
        schedule = ps.build("1f1b", ranks, 3)
    if draw(st.booleans()) and schedule.columns is not None:
        schedule = with_recompute(schedule)
    order = draw(st.sampled_from([None, None, "ascending", "reversed"]))
    if order is not None:
        schedule = ps.schedule.declare_order(schedule, forward="ascending", backward=order)
    return schedule


@st.composite
def edited(draw: st.DrawFn) -> Schedule:
    """A library schedule with up to two edits, most of which break it."""
    schedule = draw(schedules())
    rows = [list(row) for row in schedule.order]
    for _ in range(draw(st.integers(0, 2))):
        rank = draw(st.integers(0, len(rows) - 1))
        row = rows[rank]
        if not row:
            continue
        at, other = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        kind, stage, m = row[at]
        what = draw(st.sampled_from(["swap", "drop", "twice", "kind", "stage", "microbatch", "rank"]))
        if what == "swap":
            row[at], row[other] = row[other], row[at]
        elif what == "drop":
            del row[at]
        elif what == "twice":
            row.insert(other, row[at])
        elif what == "kind":
            row[at] = Op(draw(st.sampled_from([*"FBIWRX"])), stage, m)
        elif what == "stage":
            row[at] = Op(kind, stage + draw(st.sampled_from([-1, 1, 9])), m)
        elif what == "microbatch":
            row[at] = Op(kind, stage, m + draw(st.sampled_from([-1, 1, 99])))
        else:
            rows[draw(st.integers(0, len(rows) - 1))].append(row.pop(at))
    return replace(schedule, order=tuple(map(tuple, rows)))


@given(edited(), st.sampled_from([None, 1, 2, 3, 6]))
def test_a_schedule_is_proved_and_refused_alike(schedule: Schedule, limit: float | None) -> None:
    assert said(schedule, max_in_flight=limit) == said(op_by_op(schedule), max_in_flight=limit)


def lowered(schedule: Schedule) -> Any:
    try:
        return lower(schedule)
    except ps.ScheduleError as error:
        return str(error)


@given(edited())
def test_a_schedule_is_lowered_alike(schedule: Schedule) -> None:
    slow, fast = lowered(op_by_op(schedule)), lowered(schedule)
    if isinstance(slow, str):
        assert fast == slow
        return
    for name, one, other in zip(slow.arrays._fields, fast.arrays, slow.arrays, strict=True):
        assert np.array_equal(one, other), name
    assert fast.ops == slow.ops
    assert fast.number == slow.number


def test_which_schedules_have_columns() -> None:
    for name in SCHEDULES:
        schedule = ps.build(name, 4, 8)
        assert (schedule.columns is not None) == (name not in ("mllm", "distmm")), name
    assert ps.build("pipedream-2bw", 4, 8, window=4).columns is None


@pytest.mark.parametrize("name", ["zb", "zb-h1"])
def test_a_schedule_travels(name: str) -> None:
    """As its ops, or as the columns that it was built as."""
    schedule = ps.build(name, 4, 8)
    assert schedule.columns is not None
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert again.order == schedule.order
    ps.check(again)
