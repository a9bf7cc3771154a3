"""The rule `tentative` beside a loop by hand that keeps every version, in random orders: equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asynchronous_runs as runs
import penstock as ps
import tied_updates_loop as loop
from tiers import sample

pytestmark = pytest.mark.property


@st.composite
def cases(draw: st.DrawFn) -> tuple[ps.Schedule, dict[str, Any]]:
    """AMDP and 2BW of two to six ranks, PREDICT placed for any times; optimizers, clipping, who steps, dispatch."""
    d, name = 2 * draw(st.integers(1, 3)), draw(st.sampled_from(["amdp", "amdp", "pipedream-2bw", "pipedream"]))
    window = d * draw(st.integers(1, 3)) if name == "amdp" else draw(st.integers(d, 2 * d))
    schedule = ps.build(name, d, window * draw(st.integers(2, 3)), window=window)
    times = {kind: draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for kind in ("F", "B", "U", "PREDICT")}
    schedule = ps.schedule.with_tentative_updates(
        schedule, lambda op: times.get(op.kind, 0.0), message=draw(st.sampled_from([0.0, 0.5, 3.0]))
    )
    options = {
        "optimizer": draw(st.sampled_from([runs.ADAM, runs.MOMENTUM])),
        "clip_norm": draw(st.sampled_from([None, 0.05])),
        "zero": draw(st.booleans()) or name != "amdp",
        "dispatch": draw(st.sampled_from(["frozen", "dynamic"])),
    }
    return schedule, options


@settings(deadline=None, max_examples=sample(300, 12))
@given(cases())
def test_it_is_the_loop_by_hand(case: tuple[ps.Schedule, dict[str, Any]]) -> None:
    schedule, options = case
    ps.check(schedule)
    assert ps.parse(str(schedule)) == schedule
    if any(ps.schedule.staleness.predictions_of(schedule)):
        assert not loop.unlike_the_loop(schedule, num_steps=2, **options)
