"""Orders in which microbatches begin at even intervals are schedules within their caps, whatever the placement."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.engine.list_by_values import ListSpace
from penstock.planning.bounds import jackson_bound
from penstock.planning.problem import Problem, fits, pose
from penstock.planning.search import time_of
from penstock.planning.starts import SHARES, in_step, list_by_class
from penstock.schedule import Placement, circular, one_to_one, v_shape
from penstock.schedule.placement import bidirectional, wave

PLACEMENTS = {
    "one-to-one": one_to_one(4),
    "V": v_shape(4),
    "circular": circular(4, 8),
    "wave": wave(4, 2),
    "bidirectional": bidirectional(one_to_one(4)),
}


def posed(placement: Placement, num_microbatches: int, cap: float, split: bool = True, seed: int = 0) -> Problem:
    random = np.random.default_rng(seed)
    stages = placement.num_stages
    costs = ps.Costs(*(random.uniform(5.0, 15.0, stages).tolist() for _ in range(3)))
    held = [(1.0, float(random.choice([0.0, 0.5])))] * stages
    return pose(costs, placement, 4, num_microbatches, ps.Links({(1, 2): 30.0}), held, [cap] * 4, split)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("split", [True, False], ids=["halves", "whole"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 9])
def test_orders_in_step_are_schedules_within_their_caps(name: str, split: bool, num_microbatches: int) -> None:
    placement = PLACEMENTS[name]
    alone = max(sum(host == r for hosts in placement.pipelines for host in hosts) for r in range(4))
    for cap in (float(alone), alone + 1.5, 3.0 * alone, 1e9):
        problem = posed(placement, num_microbatches, cap, split, seed=num_microbatches)
        rows = list(in_step(problem))
        assert len(rows) == len(SHARES)
        for row in rows:
            assert fits(problem, row)
            made = problem.schedule(row, "made")
            ps.check(made)
            assert time_of(problem, row) >= jackson_bound(problem) * (1 - 1e-9)


def test_ops_of_no_length_are_kept_in_order() -> None:
    """All moments are one then, and only the place of a queue says what runs first."""
    problem = pose(
        ps.Costs.uniform(8, f=0.0, i=0.0, w=0.0), v_shape(4), 4, 3, ps.Links(), [(1.0, 0.0)] * 8, [2.0] * 4, True
    )
    for row in in_step(problem):
        assert fits(problem, row)
        ps.check(problem.schedule(row, "made"))


def test_of_a_large_v_orders_in_step_are_far_shorter_than_list_scheduling() -> None:
    """With 128 ranks and 1024 microbatches list scheduling took 2.8 times the bound, and plans began with that."""
    placement = v_shape(16)
    problem = pose(ps.Costs.uniform(32), placement, 16, 128, ps.Links(), [(1.0, 0.0)] * 32, [24.0] * 16, True)
    listed = list_by_class(problem, problem.priority_class, ListSpace.of(problem.queues))
    assert min(time_of(problem, row) for row in in_step(problem)) < 0.9 * listed
