"""Cutting a chain of costs: the examples one would draw, and the errors one would make."""

from __future__ import annotations

import pytest

from penstock.cost.cut import PartitionError, partition

pytestmark = pytest.mark.unit


def sizes(costs: list[float], num_stages: int) -> list[int]:
    return [len(layers) for layers in partition(costs, num_stages)]


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 4, 4, 4, 4, 3], 4, [2, 1, 1, 2]),
        ([1] * 8, 4, [2, 2, 2, 2]),
        ([1] * 6, 4, [1, 1, 2, 2]),  # the first stages hold the most in flight: they get the fewest layers
        ([0, 1, 1, 1, 9], 3, [2, 2, 1]),  # one heavy head decides the maximum; the rest is still even
        ([0, 0, 0], 3, [1, 1, 1]),
        ([0, 0, 0, 0], 2, [1, 3]),
        ([7], 1, [1]),
        ([1e308, 1e308, 1e308], 2, [1, 2]),
        ([5e-324] * 4, 2, [2, 2]),
    ],
)
def test_the_costliest_stage_is_the_least_and_the_rest_is_even(
    costs: list[float], num_stages: int, expected: list[int]
) -> None:
    assert sizes(costs, num_stages) == expected


def test_a_deep_model_is_cut_in_well_under_a_second() -> None:
    costs = [1.0 + (i * 37 % 11) for i in range(400)]
    layers = partition(costs, 64)
    assert len(layers) == 64
    assert [i for stage in layers for i in stage] == list(range(400))


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0] * 4, 5, "5 stages asked of a model of 4 layers; a stage needs at least one layer"),
        ([], 1, "1 stages asked of a model of 0 layers"),
        ([1.0], 0, "0 stages asked of a model of 1 layers; ask for at least 1"),
        ([1.0, -1.0], 1, "layer 1 costs -1.0"),
        ([float("nan")], 1, "layer 0 costs nan"),
        ([1.0, float("inf")], 2, "layer 1 costs inf"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], num_stages: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(costs, num_stages)
