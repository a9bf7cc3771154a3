"""The MLLM schedule: its totals, that none is shorter, what it keeps in flight."""

import pytest

import penstock as ps
from penstock.schedule import Op
from tiers import others_nightly

ALL_SIZES = [(p, n) for p in (1, 2, 3, 4, 5, 8, 16) for n in (1, 2, 3, 7, 20)]
SIZES = others_nightly(ALL_SIZES, [(p, n) for p, n in ALL_SIZES if (p + n) % 3 == 1])


def tessel_costs(num_ranks: int) -> ps.Costs:
    """F, E, H and their backwards take 1, B takes 3; embedding and head keep nothing."""
    p = num_ranks
    return ps.Costs(
        f=[1] * (p + 2), i=[0] * (p + 2), w=[0] * (p + 2), b=[1, *[3] * p, 1], activation=[0, *[1] * p, 0]
    )


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_takes_eight_a_microbatch_and_four_a_rank(num_ranks: int, num_microbatches: int) -> None:
    schedule = ps.build("mllm", num_ranks, num_microbatches)
    timeline = ps.simulate(schedule, tessel_costs(num_ranks))
    assert timeline.makespan == 8 * num_microbatches + 4 * (num_ranks - 1)
    assert timeline.busy == (8.0 * num_microbatches,) * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_peak_is_three_halves_of_the_way_to_the_last_rank(num_ranks: int) -> None:
    peaks = ps.simulate(ps.build("mllm", num_ranks, 20), tessel_costs(num_ranks)).peak_activations
    assert peaks == tuple(1 + -(-3 * (num_ranks - 1 - rank) // 2) for rank in range(num_ranks))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_text_parses_back_and_microbatches_keep_their_order(num_ranks: int, num_microbatches: int) -> None:
    schedule = ps.build("mllm", num_ranks, num_microbatches)
    assert ps.parse(str(schedule)) == schedule
    for row in schedule.order:
        for kind in "FB":
            for stage in {op.stage for op in row}:
                assert [op.microbatch for op in row if (op.kind, op.stage) == (kind, stage)] == list(
                    range(num_microbatches)
                )


def test_shared_ops_stand_in_every_row() -> None:
    schedule = ps.build("mllm", 3, 2)
    for row in schedule.order:
        assert [op for op in row if op.stage in (0, 4)] == [op for op in schedule.order[0] if op.stage in (0, 4)]
        assert Op("F", 4, 1) in row
    assert schedule.placement.hosts(0, 0) == schedule.placement.hosts(0, 4) == (0, 1, 2)
    assert schedule.placement.hosts(0, 2) == (1,)
