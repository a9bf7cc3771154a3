"""The rule `tentative` beside a loop by hand that keeps every version, in random orders: equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asynchronous_runs as runs
import penstock as ps
import tied_updates_loop as loop
from penstock.schedule.weight_versions import predictions_of
from tiers import sample

pytestmark = pytest.mark.property


@st.composite
def orders(draw: st.DrawFn, name: str) -> ps.Schedule:
    """Two to six ranks, any windows, GIVE and PREDICT placed for any times."""
    d = 2 * draw(st.integers(1, 3))
    window = d * draw(st.integers(1, 3)) if name == "amdp" else draw(st.integers(d, 2 * d))
    schedule = ps.build(name, d, window * draw(st.integers(2, 3)), window=window)
    times = {kind: draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for kind in ("F", "B", "U", "PREDICT")}
    message = draw(st.sampled_from([0.0, 0.5, 3.0]))
    return ps.schedule.with_tentative_updates(schedule, lambda op: times.get(op.kind, 0.0), message)


@pytest.mark.parametrize("name", ["amdp", "pipedream-2bw", "pipedream"])
@pytest.mark.parametrize("optimizer", [runs.ADAM, runs.MOMENTUM], ids=["Adam", "SGD"])
@settings(deadline=None, max_examples=sample(50, 3))
@given(data=st.data())
def test_it_is_the_loop_by_hand(data: st.DataObject, name: str, optimizer: Any) -> None:
    """300 cases at night, in one process. Those between processes stand in tests/multiproc."""
    schedule = data.draw(orders(name))
    ps.check(schedule)
    assert ps.parse(str(schedule)) == schedule
    options = {
        "clip_norm": data.draw(st.sampled_from([None, 0.05])),
        "zero": data.draw(st.booleans()) or name != "amdp",
        "dispatch": data.draw(st.sampled_from(["frozen", "dynamic"])),
    }
    if predictions_of(schedule):
        assert not loop.unlike_the_loop(schedule, optimizer, num_steps=2, **options)
