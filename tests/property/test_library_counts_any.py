"""Library schedules for any number of microbatches: valid, and no longer or larger than for the next round number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.schedule import peak_in_flight
from tiers import examples

pytestmark = pytest.mark.property

NAMES = ("interleaved-1f1b", "looped-bfs", "dualpipe", "dualpipe-v", "zb-h2", "zb-v", "v-half", "hanayo", "chimera")


@settings(deadline=None, max_examples=examples(60))
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.data())
def test_a_count_that_is_not_round_takes_no_longer_than_the_next_that_is(
    name: str, p: int, n: int, v: int, data: st.DataObject
) -> None:
    options = {}
    if name in ("interleaved-1f1b", "looped-bfs"):
        options["num_stages"] = v * p
    if name in ("dualpipe", "chimera"):
        p += p % 2
    if name in ("interleaved-1f1b", "hanayo", "chimera"):
        options["backward"] = data.draw(st.sampled_from(["whole", "split"]))
    schedule = ps.build(name, p, n, **options)
    next_round = ps.build(name, p, -(-max(n, 2 * p) // (2 * p)) * 2 * p, **options)
    costs = ps.Costs.uniform(schedule.num_stages)
    assert ps.simulate(schedule, costs).makespan <= ps.simulate(next_round, costs).makespan
    ps.check(schedule, max_in_flight=max(peak_in_flight(schedule)))
