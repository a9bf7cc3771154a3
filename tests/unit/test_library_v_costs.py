"""zb-v, v-half and v-min built with costs: the shortest pattern over the V within the memory of the plain one."""

from __future__ import annotations

from itertools import product

import pytest

import penstock as ps
from tiers import others_nightly

V = ("zb-v", "v-half", "v-min")


def peak(schedule: ps.Schedule) -> float:
    costs = ps.Costs.uniform(schedule.num_stages)
    return max(ps.simulate(schedule, costs).peak_activations)


def test_zb_v_with_costs_takes_55_at_eight_ranks_and_microbatches() -> None:
    costs = ps.Costs.uniform(16, f=1, i=1, w=1)
    plain, made = ps.build("zb-v", 8, 8), ps.build("zb-v", 8, 8, costs=costs)
    assert (ps.simulate(plain, costs).makespan, ps.simulate(made, costs).makespan) == (64.0, 55.0)
    assert peak(made) <= peak(plain) == 16


@pytest.mark.parametrize("name", V)
@pytest.mark.parametrize(
    ("num_ranks", "rounds"),
    others_nightly(product([1, 2, 3, 4, 6, 7], [1, 3]), [(1, 3), (2, 1), (3, 3), (7, 1)]),
)
def test_never_longer_and_never_more_memory(name: str, num_ranks: int, rounds: int) -> None:
    num_stages = 2 * num_ranks
    costs = ps.Costs(
        [10.0 + s % 3 for s in range(num_stages)], [12.0] * num_stages, [7.0 + s % 2 for s in range(num_stages)]
    )
    plain = ps.build(name, num_ranks, rounds * num_ranks)
    made = ps.build(name, num_ranks, rounds * num_ranks, costs=costs)
    assert (made.name, made.placement) == (plain.name, plain.placement)
    assert ps.simulate(made, costs).makespan <= ps.simulate(plain, costs).makespan
    assert peak(made) <= peak(plain)


def test_costs_for_other_stages_are_refused() -> None:
    with pytest.raises(ps.CostError):
        ps.build("zb-v", 4, 8, costs=ps.Costs.uniform(4))


def test_what_takes_no_costs_says_so() -> None:
    with pytest.raises(ps.ScheduleError, match="no option 'costs'"):
        ps.build("1f1b", 4, 8, costs=ps.Costs.uniform(4))
