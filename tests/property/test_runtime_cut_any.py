"""No cut has a cheaper costliest stage than ours: against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.cut import partition

pytestmark = pytest.mark.property


def every_cut(num_layers: int, num_stages: int) -> list[list[range]]:
    cuts = []
    for inner in combinations(range(1, num_layers), num_stages - 1):
        ends = [0, *inner, num_layers]
        cuts.append([range(a, b) for a, b in pairwise(ends)])
    return cuts


@settings(deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_least_maximum_then_least_squares_then_fewest_layers_first(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def merit(cut: list[range]) -> tuple[int, int, list[int]]:
        loads = [sum(costs[i] for i in layers) for layers in cut]
        return max(loads), sum(load * load for load in loads), [len(layers) for layers in cut]

    assert partition(costs, num_stages) == min(every_cut(len(costs), num_stages), key=merit)
