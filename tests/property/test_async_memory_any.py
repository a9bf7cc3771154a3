"""Random programs whose ops give memory back beside the ranks' work: proved, timed and written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from offload_programs import held_at_most, offloads
from penstock.formats.native import from_json, to_json
from strategies import links_for
from tiers import examples

PLACEMENTS = (
    ps.placements.one_to_one(1), ps.placements.one_to_one(3), ps.placements.v_shape(2), ps.placements.circular(2, 4),
)  # fmt: skip


def lasting(most: int = 20) -> st.SearchStrategy[float]:
    """Milliseconds above 0, so that what is held can be counted from when ops ran."""
    return st.integers(1, most).map(float) | st.floats(0.01, most)


@st.composite
def offloading(draw: st.DrawFn) -> ps.Program:
    """Some stages of some placement give part of each activation away and take it again, under a limit or none."""
    placement = draw(st.sampled_from(PLACEMENTS))
    num_stages, num = placement.num_stages, draw(st.integers(1, 6))
    stages = draw(st.lists(st.integers(0, num_stages - 1), min_size=1, unique=True))
    most = max(len(placement.stages_of(rank)) for rank in range(3 if placement is PLACEMENTS[1] else 2))
    limit = draw(st.none() | st.integers(2 * most, 2 * most + 3))
    share = draw(st.sampled_from([1.0, 0.5]))
    row = st.lists(lasting(), min_size=num_stages, max_size=num_stages)
    costs = ps.Costs(draw(row), draw(row), draw(row), activation=[draw(st.sampled_from([1.0, 2.5]))] * num_stages)
    rules = ps.Rules(draw(st.sampled_from(["backward-first", "forward-first"])), max_in_flight=limit)
    ops = offloads(stages, num_stages - 1, draw(lasting()), share)
    return ps.Program(placement, num, rules, split=draw(st.booleans()), costs=costs, ops=ops)


@settings(max_examples=examples(60))
@given(st.data())
def test_no_rank_ever_holds_more_than_the_limit(data: st.DataObject) -> None:
    program = data.draw(offloading())
    schedule, costs = program.build(), program.all_costs
    assert ps.parse(str(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule
    late = costs.with_other({("OFFLOAD", stage): data.draw(lasting(60)) for stage in range(schedule.num_stages)})
    links = data.draw(links_for(schedule))
    most = schedule.max_in_flight
    for dispatch in ("frozen", "hinted", "dynamic", "hinted:0.5"):
        timeline = ps.simulate(schedule, late, links=links, dispatch=dispatch)
        assert timeline.peak_activations == pytest.approx(held_at_most(timeline, costs))
        if most is not None:
            assert max(timeline.peak_activations) <= most * costs.activation[0] * (1 + 1e-9)
    ps.check(ps.simulate(schedule, late, links=links).executed())


@settings(max_examples=examples(25))
@given(st.data())
def test_the_steps_build_the_same(data: st.DataObject) -> None:
    program = data.draw(offloading())
    assert ps.program.Stepper(program).run() == program.build()
