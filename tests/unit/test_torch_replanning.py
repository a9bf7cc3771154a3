"""When plans are made anew in torch's runtime: decided from scripted measurements, without a clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.formats.native import from_json
from penstock.integrations.torch import Replanned, Replanner
from penstock.integrations.torch_replanning import PlanUpdater, StageReports
from penstock.passes import add_communication, remove_communication

NUM_RANKS, NUM_MICROBATCHES = 4, 12
COSTS = ps.Costs(f=[28, 31, 25, 33], i=[0, 30, 27, 26], w=[59, 25, 34, 29])


def measured(plan: ps.Schedule, costs: ps.Costs, links: ps.Links, begin: float) -> StageReports:
    """What the ranks of a pipeline report of a step, if it runs as simulated."""
    moments = {
        stage: torch.full((2, 3, NUM_MICROBATCHES), math.nan, dtype=torch.float64) for stage in range(NUM_RANKS)
    }
    for message in ps.simulate(plan, costs, links, channels="gloo").messages:
        way, m = int(message.source.kind != "F"), message.source.microbatch
        assert message.posted is not None
        moments[message.source.stage][way, 0, m] = begin + message.sent
        moments[message.target.stage][way, 1, m] = begin + message.posted
        moments[message.target.stage][way, 2, m] = begin + message.arrived
    kinds = [costs.f, costs.b, costs.i, costs.w]
    return {stage: ([float(kind[stage]) for kind in kinds], moments[stage]) for stage in range(NUM_RANKS)}


def train(
    num_steps: int,
    links_of: Callable[[int], Mapping[int, ps.Links]],
    costs_of: Callable[[int], ps.Costs] = lambda step: COSTS,
    options: Replanner | None = None,
) -> tuple[list[Replanned], ps.Schedule, ps.Schedule]:
    """Steps of one or more pipelines that change their plan together.

    Args:
        links_of: step -> pipeline -> its links.

    Returns:
        The changes, the first plan and the last one.
    """
    first = ps.build("zb-h1", NUM_RANKS, NUM_MICROBATCHES)
    schedule = SimpleNamespace(plan=add_communication(first, channels="gloo"), channels="gloo")
    options = options or Replanner(lambda costs, links, running: ps.build("zb", NUM_RANKS, NUM_MICROBATCHES))
    recorder = SimpleNamespace(schedule=schedule, options=options, first=first, offer=None, num_steps=0)
    updater = PlanUpdater(recorder)  # type: ignore[arg-type]
    changes = []
    for step in range(num_steps):
        recorder.num_steps = step + 2  # a step's notes arrive during the next one
        links = links_of(step)
        updater.consider(
            {number: measured(schedule.plan, costs_of(step), links[number], 2e3 * step) for number in links}
        )
        if updater.thread is not None:
            updater.thread.join()
        if recorder.offer is not None:
            (text, record), recorder.offer = recorder.offer, None
            schedule.plan = from_json(text.decode())
            changes.append(record)
    return changes, first, schedule.plan


def late(ms: float, back: float | None = None) -> ps.Links:
    return ps.Links({(2, 3): ms, (3, 2): ms if back is None else back})


@pytest.mark.parametrize("ms", [60.0, 120.0])
def test_a_late_link_gets_a_plan_after_two_steps_and_the_first_comes_back_when_it_heals(ms: float) -> None:
    changes, first, last = train(30, lambda step: {0: late(ms if 10 <= step < 20 else 0.0)})
    assert [each.detected for each in changes] == [12, 22]
    assert changes[0].links == pytest.approx({(2, 3): ms, (3, 2): ms} | dict.fromkeys(links_at_home(), 0.0), abs=0.1)
    assert changes[1].links == pytest.approx(dict.fromkeys([(2, 3), (3, 2), *links_at_home()], 0.0), abs=0.1)
    assert all(each.after < 0.98 * each.before for each in changes)
    assert remove_communication(last).order == first.order


def links_at_home() -> list[tuple[int, int]]:
    return [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_one_direction_turns_late() -> None:
    changes, _, _ = train(14, lambda step: {0: late(90.0 if step >= 10 else 0.0, back=0.0)})
    assert [each.detected for each in changes] == [12]
    assert changes[0].links[2, 3] == pytest.approx(90.0, abs=0.1)
    assert changes[0].links[3, 2] == pytest.approx(0.0, abs=0.1)


def test_a_link_that_is_late_from_the_start_gets_a_plan() -> None:
    changes, first, last = train(5, lambda step: {0: late(60.0)}, options=Replanner(seconds=0.5))
    assert [each.detected for each in changes] == [2]
    assert changes[0].after < 0.9 * changes[0].before
    assert max(ps.schedule.peak_in_flight(last)) <= max(ps.schedule.peak_in_flight(first))


def test_one_late_step_and_other_op_times_change_nothing() -> None:
    draws = random.Random(3)

    def costs_of(step: int) -> ps.Costs:
        return ps.Costs(*([ms * draws.uniform(0.8, 1.2) for ms in each] for each in (COSTS.f, COSTS.i, COSTS.w)))

    changes, first, last = train(30, lambda step: {0: late(80.0 if step in (8, 15) else 0.0)}, costs_of)
    assert changes == []
    assert remove_communication(last).order == first.order


def test_pipelines_that_vote_together_get_one_plan_for_the_latest_link() -> None:
    slow = ps.Links({(0, 1): 15.0, (1, 0): 15.0})
    changes, _, _ = train(14, lambda step: {0: late(0.0), 7: late(60.0) if step >= 10 else slow})
    assert [each.detected for each in changes][-1] == 12
    assert changes[-1].links[2, 3] == pytest.approx(60.0, abs=0.1)


def test_a_plan_that_gains_too_little_is_not_taken() -> None:
    def same(costs: ps.Costs, links: ps.Links, running: ps.Schedule) -> ps.Schedule:
        return remove_communication(running)

    changes, _, _ = train(20, lambda step: {0: late(60.0 if step >= 10 else 0.0)}, options=Replanner(same))
    assert changes == []


def split_but_for(stages: set[int]) -> ps.Schedule:
    """1F1B with split backwards in all stages but these."""
    whole = ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES)

    def forms(op: ps.Op) -> str:
        return "IW" if op.kind == "B" and op.stage not in stages else op.kind

    rows = [[op._replace(kind=kind) for op in row for kind in forms(op)] for row in whole.order]
    return ps.Schedule.of("split", whole.placement, rows, NUM_MICROBATCHES)


@pytest.mark.parametrize("whole", [{0, 1, 2, 3}, {3}])
def test_stages_whose_backwards_are_whole_keep_them_whole(whole: set[int]) -> None:
    first = split_but_for(whole)
    recorder: Any = SimpleNamespace(first=first, options=Replanner(seconds=0.5))
    found = PlanUpdater(recorder)._best(COSTS, late(60.0), first)
    ps.check(found)
    assert {op.stage for row in found.order for op in row if op.kind == "B"} == whole
    assert {op.stage for row in found.order for op in row if op.kind in ("I", "W")} == {0, 1, 2, 3} - whole
    assert max(ps.schedule.peak_in_flight(found)) <= max(ps.schedule.peak_in_flight(first))


def test_a_planner_that_refuses_is_heard_and_the_first_plan_still_comes_back() -> None:
    plans = iter([ps.build("zb", NUM_RANKS, NUM_MICROBATCHES)])

    def once(costs: ps.Costs, links: ps.Links, running: ps.Schedule) -> ps.Schedule:
        for found in plans:
            return found
        raise ps.ScheduleError("not for this loss", rule="torch")

    with pytest.warns(UserWarning, match="not for this loss"):
        changes, first, last = train(
            30, lambda step: {0: late(60.0 if 10 <= step < 20 else 0.0)}, options=Replanner(once)
        )
    assert [each.detected for each in changes] == [12, 22]
    assert remove_communication(last).order == first.order
