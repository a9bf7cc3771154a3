"""What ranks hold: small cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.simulation.memory_footprint import RankFootprint, count_buffers

pytestmark = pytest.mark.unit

COSTS = ps.Costs(
    [1] * 3,
    [1] * 3,
    [1] * 3,
    activation=[10, 20, 30],
    weight_bytes=[100, 200, 300],
    gradient_bytes=[101, 202, 303],
    optimizer_bytes=[1000, 2000, 3000],
)


def uniform(num_stages: int, **rows: float) -> ps.Costs:
    """A weight of 1, a gradient of 1, state of 6 and an activation of 1 a stage."""
    each = {"weight_bytes": 1.0, "optimizer_bytes": 6.0, **rows}
    return replace(ps.Costs.uniform(num_stages), **{name: [value] * num_stages for name, value in each.items()})


def test_one_stage_a_rank() -> None:
    found = ps.footprint(ps.build("1f1b", 3, 6), COSTS)
    assert found.ranks == (
        RankFootprint(100, 0, 101, 1000, 3 * 10, 0),
        RankFootprint(200, 0, 202, 2000, 2 * 20, 0),
        RankFootprint(300, 0, 303, 3000, 1 * 30, 0),
    )
    assert found.totals == (1231, 2442, 3633)
    assert found.peak == 3633
    assert found.mean == (1231 + 2442 + 3633) / 3
    assert found.balance == pytest.approx(found.mean / 3633)


def test_pipedream_keeps_a_version_for_each_update_between() -> None:
    found = ps.footprint(ps.build("pipedream", 3, 8, window=1), COSTS)
    assert [rank.weights + rank.versions for rank in found.ranks] == [3 * 100, 2 * 200, 1 * 300]
    assert [rank.gradients for rank in found.ranks] == [101, 202, 303]


def test_two_buffers_whatever_the_window() -> None:
    for window in (3, 6):
        found = ps.footprint(ps.build("pipedream-2bw", 3, 12, window=window), COSTS)
        assert [rank.versions for rank in found.ranks] == [100, 200, 300]


def test_predictions_need_no_version_where_the_optimizer_has_parameters_of_its_own() -> None:
    schedule = ps.build("xpipe", 3, 6, window=3)
    assert [rank.versions for rank in ps.footprint(schedule, COSTS).ranks] == [100, 200, 0]
    assert [rank.versions for rank in ps.footprint(schedule, COSTS, masters=True).ranks] == [0, 0, 0]
    stashing = ps.build("pipedream-2bw", 3, 6, window=3)
    assert ps.footprint(stashing, COSTS, masters=True) == ps.footprint(stashing, COSTS)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_amdp_has_half_as_many_copies_as_ranks_and_one_owner(num_ranks: int) -> None:
    schedule = ps.build("amdp", num_ranks, 4 * num_ranks, window=2 * num_ranks)
    copies = num_ranks // 2
    found = ps.footprint(schedule, uniform(num_ranks))
    assert {rank.weights for rank in found.ranks} == {copies}
    assert {rank.versions for rank in found.ranks} == {0}
    assert {rank.optimizer for rank in found.ranks} == {6}
    everywhere = ps.footprint(schedule, uniform(num_ranks), sharding="none")
    assert {rank.optimizer for rank in everywhere.ranks} == {6 * copies}
    assert [rank._replace(optimizer=0) for rank in everywhere.ranks] == [
        rank._replace(optimizer=0) for rank in found.ranks
    ]


@pytest.mark.parametrize("zero", [True, False])
def test_copies_of_a_synchronous_schedule(zero: bool) -> None:
    found = ps.footprint(ps.build("chimera", 4, 4), uniform(4), sharding="copies" if zero else "none")
    assert {(rank.weights, rank.gradients, rank.optimizer) for rank in found.ranks} == {(2, 2, 6 if zero else 12)}


def test_several_stages_a_rank() -> None:
    costs = replace(uniform(6), weight_bytes=[1, 2, 4, 8, 16, 32])
    assert [rank.weights for rank in ps.footprint(ps.build("interleaved-1f1b", 3, 3), costs).ranks] == [9, 18, 36]
    assert [rank.weights for rank in ps.footprint(ps.build("zb-v", 3, 6), costs).ranks] == [33, 18, 12]


def test_a_stage_that_all_ranks_share_counts_on_each() -> None:
    schedule = ps.build("mllm", 2, 4)
    costs = replace(uniform(schedule.num_stages), weight_bytes=[100, *[1] * (schedule.num_stages - 2), 1000])
    assert {rank.weights for rank in ps.footprint(schedule, costs).ranks} == {100 + 1 + 1000}


WINDOWS_OF_TWO = """schedule mine: 2 ranks, 2 stages, 4 microbatches
pipeline 0: stages on ranks 0 1, microbatches 0 2
pipeline 1: stages on ranks 1 0, microbatches 1 3
updates every 2 microbatches
rank 0 | 0F0 1F1 1B1 0B0 0F2 0B2 0U0 1U1 1F3 1B3 0U2 1U3
rank 1 | 0F1 1F0 1B0 0B1 1F2 1B2 0F3 0B3 1U0 0U1 1U2 0U3
"""


def test_gradients_of_two_windows_at_once() -> None:
    """Stage 0's owner begins window 1 (B2) before U0, stage 1's too; the copies have sent theirs by then."""
    schedule = ps.parse(WINDOWS_OF_TWO)
    assert count_buffers(schedule) == {(0, 0): 2, (1, 0): 2, (0, 1): 1, (1, 1): 1}
    ahead = replace(schedule, order=tuple(tuple(op for op in row if op.kind != "U") for row in schedule.order))
    assert count_buffers(replace(ahead, updates=None)) == dict.fromkeys(count_buffers(schedule), 1)


def test_a_copy_whose_next_window_begins_before_its_last_one_ends_has_both() -> None:
    """Window 1 (B5) begins before window 0 ends (B3)."""
    schedule = ps.parse(
        """schedule mine: 2 ranks, 2 stages, 8 microbatches
pipeline 0: stages on ranks 0 1, microbatches 0 2 4 6
pipeline 1: stages on ranks 1 0, microbatches 1 3 5 7
updates every 4 microbatches
rank 0 | 1F1 1F3 1F5 1B1 1B5 1B3 1F7 1B7 0F0 0F2 0B0 0B2 0U0 1U1 0F4 0B4 0F6 0B6 0U2 1U3
rank 1 | 0F1 0F3 0F5 0B1 0B5 0B3 0F7 0B7 1F0 1F2 1B0 1B2 1U0 0U1 1F4 1B4 1F6 1B6 1U2 0U3
"""
    )
    assert count_buffers(schedule) == {(0, 0): 1, (1, 0): 1, (0, 1): 2, (1, 1): 2}


def test_split_backwards_give_gradients_at_w() -> None:
    schedule = ps.schedule.with_updates(ps.build("zb-h1", 2, 4), 2)
    assert set(count_buffers(schedule).values()) == {1}
    costs = replace(uniform(2), freed_by_input=0.0)
    held = ps.footprint(schedule, costs)
    assert [rank.gradients for rank in held.ranks] == [1, 1]


def test_over_channels_a_receiver_holds_what_it_has_posted() -> None:
    schedule, costs = ps.build("gpipe", 2, 3), replace(uniform(2), message_bytes=[5.0, 0.0])
    assert [rank.messages for rank in ps.footprint(schedule, costs, channels="gloo").ranks] == [15, 15]
    assert [rank.messages for rank in ps.footprint(schedule, costs).ranks] == [5, 5]


def test_messages_are_held_by_the_sender_until_they_arrive_and_then_by_the_receiver() -> None:
    schedule = ps.schedule.with_updates(ps.build("gpipe", 2, 2), 2)
    costs = replace(uniform(2), message_bytes=[5.0, 0.0])
    there = ps.footprint(schedule, costs)
    # Rank 1 runs F0 on arrival, and keeps what it reads until the op's end; then F1 the same. F1's message comes as
    # F0 ends, so there is one at a time. So with gradients on rank 0.
    assert [rank.messages for rank in there.ranks] == [5, 5]
    late = ps.footprint(schedule, costs, links=ps.Links({(0, 1): 10.0}))
    assert [rank.messages for rank in late.ranks] == [10, 10]  # both under way at once, either way


def test_the_owner_holds_gradients_that_came_until_it_adds_them_up() -> None:
    schedule = ps.build("amdp", 4, 8, window=8)
    alone = replace(uniform(4), other={"U": 1.0})
    told = ps.footprint(schedule, replace(alone, update_bytes=[7.0] * 4))
    assert all(rank.messages >= 7 for rank in told.ranks)
    assert {rank.messages for rank in ps.footprint(schedule, alone).ranks} == {0}


def test_dispatch_and_links_are_those_of_the_run() -> None:
    schedule, links = ps.build("zb", 4, 12), ps.Links({(2, 3): 30.0})
    costs = uniform(4)
    for dispatch in ("frozen", "dynamic"):
        run = ps.simulate(schedule, costs, links=links, dispatch=dispatch)
        held = ps.footprint(schedule, costs, links=links, dispatch=dispatch)
        assert tuple(rank.activations for rank in held.ranks) == run.peak_activations


def test_costs_without_weights_are_refused() -> None:
    with pytest.raises(ps.CostError, match="do not say what weights take; give weight_bytes"):
        ps.footprint(ps.build("1f1b", 2, 2), ps.Costs.uniform(2))


def test_gradients_weigh_what_weights_do_where_nothing_is_said() -> None:
    costs = replace(ps.Costs.uniform(2), weight_bytes=[3, 4])
    assert [rank[:4] for rank in ps.footprint(ps.build("1f1b", 2, 2), costs).ranks] == [(3, 0, 3, 0), (4, 0, 4, 0)]


def test_room_for_activations_is_what_the_rest_leaves() -> None:
    for name in ("1f1b", "zb-v", "dualpipe"):
        schedule = ps.build(name, 4, 8)
        costs = ps.cost.costs_preset("gpt2-7b", schedule.num_stages)
        held = ps.footprint(schedule, costs).ranks
        room = ps.simulation.room_for_activations(schedule.placement, costs, 60 * 2**30)
        for own, each in zip(room, held, strict=True):
            assert own == pytest.approx(60 * 2**30 - (each.total - each.activations - each.messages), rel=1e-12)
    limits = [1500, 2600, 3700]
    placement = ps.build("1f1b", 3, 6).placement
    assert ps.simulation.room_for_activations(placement, COSTS, limits) == (1500 - 1201, 2600 - 2402, 3700 - 3603)


@pytest.mark.parametrize(
    ("limits", "words"),
    [([1, 2], "2 memory limits for 3 ranks"), (3000, "rank 2 holds .* in all; raise the limit")],
)
def test_no_room_is_refused(limits: list[float] | float, words: str) -> None:
    placement = ps.build("1f1b", 3, 6).placement
    with pytest.raises(ps.CostError, match=words):
        ps.simulation.room_for_activations(placement, COSTS, limits)
    with pytest.raises(ps.CostError, match="do not say what weights take"):
        ps.simulation.room_for_activations(placement, ps.Costs.uniform(3), 3000)
