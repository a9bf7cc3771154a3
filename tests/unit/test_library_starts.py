"""Library schedules as starts of plans, and the clock meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

import penstock as ps
from penstock.library import SCHEDULES
from penstock.planning import starts
from penstock.planning.joint import search as joint
from penstock.planning.joint.problem import pose_joint
from penstock.planning.options import OpForms, limits_of
from penstock.schedule import peak_in_flight

PLACEMENTS = [
    ps.placements.one_to_one(4),
    ps.placements.circular(4, 8),
    ps.placements.v_shape(4),
    ps.placements.wave(2, 2),
    ps.placements.multi_directional(4),
    ps.placements.multi_directional(6),
    ps.placements.bidirectional(ps.placements.one_to_one(4)),
    ps.placements.bidirectional(ps.placements.circular(4, 8)),
    ps.placements.bidirectional(ps.placements.v_shape(4)),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_library_schedule_of_a_placement_is_a_start_and_no_other_is_built(
    placement: ps.Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where forms are free too, all of the library was built for any placement."""
    num_ranks = 1 + max(map(max, placement.pipelines))
    fitting = set()
    for name in SCHEDULES:
        for options in ({}, {"num_stages": placement.num_stages}):
            try:
                made = ps.build(name, num_ranks, 8, **options)
            except ps.ScheduleError:
                continue
            if made.placement == placement and made.updates is None and made.stage_graph is None:
                fitting.add(made.order)  # asynchronous schedules without updates run others' orders
    asked: list[str] = []

    def recorded(name: str, *given: Any, **options: Any) -> ps.Schedule:
        asked.append(name)
        return ps.build(name, *given, **options)

    monkeypatch.setattr(starts, "build", recorded)
    found = list(starts.built(placement, num_ranks, 8))
    assert fitting <= {made.order for _, made in found}
    assert set(asked) == {name for name, _ in found}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_a_plan_is_never_longer_than_a_library_schedule_in_the_same_memory(
    placement: ps.Placement, split: bool
) -> None:
    """Plans with one stage per rank were longer than zb-h1, and those with split backwards than what has whole ones.

    The search is ended by the first step after the first order, whatever the clock says: that looks at the library.
    """
    num_ranks = 1 + max(map(max, placement.pipelines))
    costs, links = ps.Costs.uniform(placement.num_stages, f=10, i=12, w=8), ps.Links(default=1.0)
    compared = 0

    def ended(seen: Any) -> None:
        if seen.how != "greedy":
            raise KeyboardInterrupt

    found = []
    for name, (_, forms) in starts.STARTS.items():
        for form in forms:
            for stages in ({}, {"num_stages": placement.num_stages}, {"waves": 1}):
                with suppress(ps.ScheduleError):
                    found.append(ps.build(name, num_ranks, 8, **form, **stages))
    for made in found:
        kinds = {op.kind for row in made.order for op in row}
        if made.placement != placement or (not split and "W" in kinds):
            continue
        compared += 1
        planned = ps.plan(
            costs, num_ranks, 8, links, placement=placement, max_in_flight=max(peak_in_flight(made)), split=split,
            time_limit=60.0, progress=ended,
        )  # fmt: skip
        assert planned.makespan <= ps.simulate(made, costs, links=links).makespan * (1 + 1e-9), made.name
    assert compared or not found


def test_the_clock_is_looked_at_within_a_library_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked at between them alone, so one that takes long went on long after the end."""
    costs = ps.Costs.uniform(4)
    limits = limits_of(costs, ps.placements.one_to_one(4), 4, None, 2.0, True, 0.1)
    forms = OpForms(again=True, whole=True, split=True)
    posed = pose_joint(costs, ps.placements.one_to_one(4), 4, [8], ps.Links(), limits, forms)
    now = [0.0]
    search = joint.begin(posed, 0, 0.0, None, 0.0)
    search.clock, search.began, search.until = (lambda: now[0]), 0.0, 1.0
    built, again = [], []

    def slow(name: str, *given: Any, **options: Any) -> ps.Schedule:
        built.append(name)
        now[0] += 0.6
        return ps.build(name, *given, **options)

    def noted(schedule: ps.Schedule, *given: Any) -> ps.Schedule:
        again.append(schedule.name)
        return ps.passes.recompute(schedule, *given)

    monkeypatch.setattr(starts, "build", slow)
    monkeypatch.setattr(joint, "recompute", noted)
    joint.library(search)
    assert len(built) == 2  # the time is over when the second has been built
    assert again == built[:1]
