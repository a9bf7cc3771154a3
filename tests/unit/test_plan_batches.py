"""Batches planned from lengths: bins of whole sequences, replicas as busy as each other, and never slower."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

import penstock as ps
from penstock.cost import CostError, CostsByLength, LengthLine
from penstock.planning import BatchPlan, PackingError, assign_evenly, plan_batch
from penstock.planning.batches import pack_in_turn, pack_to_shares, tapered_shares

pytestmark = pytest.mark.unit


def by_length(schedule: ps.Schedule) -> CostsByLength:
    """Of a sequence of 1000 tokens attention takes as long as the rest."""
    each = schedule.num_ranks / schedule.num_stages
    rows = [LengthLine(0.05 * each, 0.01 * each, 1e-5 * each)] * schedule.num_stages
    return CostsByLength(rows, rows, rows)


def drawn(num: int, seed: int) -> list[int]:
    draws = np.random.default_rng(seed).lognormal(5, 1.2, num)
    return np.clip(draws, 4, 1000).astype(int).tolist()


def run(plan: BatchPlan, replica: int, lengths: list[int], schedule: ps.Schedule, dispatch: str) -> ps.Timeline:
    """The microbatches of a replica, in their order, through the schedule as it is."""
    microbatches = [[lengths[s] for s in bin_] for bin_ in plan.microbatches[replica]]
    return ps.simulate(schedule, by_length(schedule).of(microbatches), dispatch=dispatch)


# Assignment


def test_groups_of_equally_many_are_as_busy_as_each_other() -> None:
    for seed in range(20):
        work = np.random.default_rng(seed).lognormal(0, 0.6, 32 * 8)
        groups = assign_evenly(work, 32)
        assert sorted(chain(*groups)) == list(range(256))
        assert {len(group) for group in groups} == {8}
        sums = np.array([work[group].sum() for group in groups])
        ascending = np.sort(work)
        bound = max(sums.mean(), ascending[-1] + ascending[:7].sum())  # whose group has the longest has seven more
        assert sums.max() <= 1.003 * bound


@pytest.mark.parametrize("work", [[1.0, -1.0], [1.0, float("nan")], [1.0, 2.0, 3.0], [], [[1.0, 2.0]]])
def test_work_that_makes_no_sense_is_refused(work: list[float]) -> None:
    with pytest.raises(ps.ScheduleError, match=r"give a multiple|must be a row of numbers"):
        assign_evenly(work, 2)


# Packing


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_is_in_one_bin_and_no_bin_is_empty(seed: int) -> None:
    draw = np.random.default_rng(seed)
    bins = int(draw.integers(1, 20))
    lengths = drawn(bins + int(draw.integers(0, 4) * draw.integers(0, 30)), seed)
    lengths[int(draw.integers(len(lengths)))] = 10 ** int(draw.integers(1, 7))  # one that fills most of the batch
    shares = tapered_shares(bins, float(draw.integers(0, 9)), 0.2)
    for packed in (pack_in_turn(lengths, bins), pack_to_shares(lengths, lengths, shares)):
        assert sorted(chain(*packed)) == list(range(len(lengths)))
        assert len(packed) == bins
        assert all(packed)
    assert list(chain(*pack_in_turn(lengths, bins))) == list(range(len(lengths)))


def test_shares_of_the_work_are_kept() -> None:
    assert pack_to_shares([8, 5, 4, 3], [8, 5, 4, 3], [1, 1]) == [[0, 3], [1, 2]]
    assert pack_to_shares([8, 5, 4, 3], [8, 5, 4, 3], [1, 3]) == [[2], [0, 1, 3]]
    lengths = drawn(4000, 1)
    shares = tapered_shares(16, 4, 0.4)
    work = np.array([sum(lengths[s] for s in own) for own in pack_to_shares(lengths, lengths, shares)])
    assert np.abs(work / work.mean() / shares - 1).max() < 0.01


def test_a_limit_of_tokens_is_kept_or_said_to_be_too_low() -> None:
    lengths = drawn(300, 2)
    limit = 1.05 * sum(lengths) / 8
    packed = pack_to_shares(lengths, np.square(lengths), [1] * 8, limit)
    assert max(sum(lengths[s] for s in own) for own in packed) <= limit
    with pytest.raises(PackingError, match=r"a sequence of \d+ tokens finds no bin with room .* raise it"):
        pack_to_shares(lengths, lengths, [1] * 8, 0.9 * sum(lengths) / 8)


@pytest.mark.parametrize("lengths", [[3, 2], [3, 0, 4, 5], [3.5, 2.0, 1.0, 1.0], [[1, 2], [3, 4]]])
def test_lengths_that_make_no_sense_are_refused(lengths: list[int]) -> None:
    with pytest.raises(PackingError, match=r"a whole number above 0|at least one each"):
        pack_in_turn(lengths, 3)


# The whole


@pytest.mark.parametrize(("name", "ranks", "num"), [("1f1b", 4, 8), ("zb-h1", 4, 16), ("zb-v", 4, 8), ("zb", 2, 6)])
def test_a_planned_batch_is_faster_than_arrival_within_its_memory_as_the_simulator_says(
    name: str, ranks: int, num: int
) -> None:
    schedule = ps.build(name, ranks, num)
    gains = []
    for seed, replicas in enumerate((1, 1, 3, 2)):
        lengths = drawn(3 * num * replicas, seed)
        plan = plan_batch(lengths, schedule, by_length(schedule), num_replicas=replicas, dispatches=("frozen",))
        assert sorted(chain(*chain(*plan.microbatches))) == list(range(len(lengths)))
        assert [len(own) for own in plan.microbatches] == [num] * replicas
        runs = [run(plan, k, lengths, schedule, "frozen") for k in range(replicas)]
        assert max(each.makespan for each in runs) == pytest.approx(plan.makespan)
        peak = max(max(each.peak_activations) for each in runs)
        assert peak == pytest.approx(plan.peak)
        assert peak <= plan.cap * (1 + 1e-9)
        assert plan.makespan <= plan.arrival
        arrived = pack_in_turn(lengths, num * replicas)
        taken = [arrived[k * num : (k + 1) * num] for k in range(replicas)]
        costs = [by_length(schedule).of([[lengths[s] for s in own] for own in each]) for each in taken]
        arrival = [ps.simulate(schedule, each) for each in costs]
        assert max(each.makespan for each in arrival) == pytest.approx(plan.arrival)
        assert max(max(each.peak_activations) for each in arrival) == pytest.approx(plan.cap)
        gains.append(plan.gain)
    assert np.mean(gains) > 0.05


def test_a_gain_within_the_noise_changes_nothing() -> None:
    schedule, lengths = ps.build("1f1b", 4, 8), drawn(24, 3)
    plan = plan_batch(lengths, schedule, by_length(schedule))
    assert plan.gain > 0.1
    same = plan_batch(lengths, schedule, by_length(schedule), noise=plan.gain + 0.01)
    assert same.packing == "arrival"
    assert list(chain(*chain(*same.microbatches))) == list(range(24))


def test_a_batch_that_arrives_over_the_limits_is_packed_within_them() -> None:
    """One microbatch of all the long ones would be arrival's."""
    schedule = ps.build("1f1b", 2, 4)
    lengths = [1000] * 4 + [10] * 40
    limit = 1200
    plan = plan_batch(lengths, schedule, by_length(schedule), token_limit=limit, noise=1e9)
    assert plan.packing != "arrival"
    assert max(sum(lengths[s] for s in own) for own in plan.microbatches[0]) <= limit
    with pytest.raises(PackingError, match=r"finds no bin|find no room"):
        plan_batch(lengths, schedule, by_length(schedule), token_limit=900)
    with pytest.raises(ps.ScheduleError, match="rule: memory"):
        plan_batch(lengths, schedule, by_length(schedule), memory_limit=900)


def test_what_cannot_be_planned_is_refused() -> None:
    schedule = ps.build("1f1b", 2, 4)
    with pytest.raises(PackingError, match="3 sequences can't fill 4 microbatches"):
        plan_batch([5, 6, 7], schedule, by_length(schedule))
    with pytest.raises(ps.ScheduleError, match="0 replicas"):
        plan_batch([5] * 4, schedule, by_length(schedule), num_replicas=0)
    with pytest.raises(CostError, match="for 2 stages, the schedule has 4"):
        plan_batch([5] * 8, ps.build("1f1b", 4, 8), by_length(schedule))


# Towers


def of_towers() -> CostsByLength:
    """An encoder of images in one stage, whose images do not see each other, and a decoder in three."""
    encoder, decoder = LengthLine(0.1, 0.02, 4e-5), LengthLine(0.05, 0.01, 1e-5)
    rows = [encoder] + [decoder] * 3
    return CostsByLength(rows, rows, rows, towers=["images", "text", "text", "text"])


def samples_of_towers(num: int, seed: int) -> dict[str, list[list[int]]]:
    """A text has its own tokens and those of its images, of which there are none, one or some."""
    draw = np.random.default_rng(seed)
    images = [draw.integers(50, 600, k).tolist() for k in draw.poisson(1.5, num)]
    text = [[int(length) + sum(own)] for length, own in zip(draw.lognormal(5, 0.8, num) + 1, images, strict=True)]
    return {"images": images, "text": text}


def joined(lengths: dict[str, list[list[int]]], bins: list[list[int]] | tuple[tuple[int, ...], ...]) -> ps.Costs:
    return of_towers().of(
        {name: [list(chain(*(own[s] for s in each))) for each in bins] for name, own in lengths.items()}
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_batch_of_towers_is_faster_than_arrival_as_the_simulator_says(replicas: int) -> None:
    schedule, gains = ps.build("1f1b", 4, 8), []
    for seed in range(4):
        lengths = samples_of_towers(32 * replicas, seed)
        plan = plan_batch(lengths, schedule, of_towers(), num_replicas=replicas, dispatches=("frozen",))
        assert sorted(chain(*chain(*plan.microbatches))) == list(range(32 * replicas))
        runs = [ps.simulate(schedule, joined(lengths, own)) for own in plan.microbatches]
        assert max(each.makespan for each in runs) == pytest.approx(plan.makespan)
        assert max(max(each.peak_activations) for each in runs) == pytest.approx(plan.peak)
        arrived = pack_in_turn([sum(own) for own in lengths["text"]], 8 * replicas)
        before = [ps.simulate(schedule, joined(lengths, arrived[k : k + 8])) for k in range(0, 8 * replicas, 8)]
        assert max(each.makespan for each in before) == pytest.approx(plan.arrival)
        gains.append(plan.gain)
    assert min(gains) >= 0
    assert np.mean(gains) > 0.1


def test_every_tower_gets_even_shares() -> None:
    """Shares of the whole work alone leave the towers as uneven as they come."""
    lengths = samples_of_towers(400, 1)
    work = of_towers().work_by_tower(of_towers().sums(lengths))
    tokens = [sum(own) for own in lengths["text"]]
    uneven = {}
    for name, given in (("one", work.sum(axis=1)), ("each", work)):
        bins = pack_to_shares(tokens, given, [1] * 8)
        assert sorted(chain(*bins)) == list(range(400))
        shares = np.array([work[own].sum(axis=0) for own in bins])
        uneven[name] = (shares.max(axis=0) / shares.mean(axis=0)).max() - 1
    assert uneven["each"] < 0.02
    assert uneven["each"] < uneven["one"] / 3


@pytest.mark.parametrize("seed", [2, 10])
def test_packings_that_some_replica_cannot_hold_leave_the_batch_as_it_arrived(seed: int) -> None:
    """Packings are compared on the busiest replicas; of those chosen so another one exceeds the cap."""
    plan = plan_batch(samples_of_towers(96, seed), ps.build("1f1b", 4, 8), of_towers(), num_replicas=3)
    assert plan.packing == "arrival"
    assert plan.peak == plan.cap


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5] * 8, CostError, "take lengths of images, text: give those of each"),
        ({"text": [5] * 8}, CostError, "are given of 'text', and stages take those of 'images', 'text'"),
        ({"images": [5] * 8, "txt": [5] * 8}, CostError, "'images', 'txt'"),
        ({"images": [5] * 7, "text": [5] * 8}, CostError, "7 of images, 8 of text"),
        ({"images": [5] * 8, "text": [0] * 8}, PackingError, "a whole number above 0"),
        ({"images": [-1] * 8, "text": [5] * 8}, CostError, "the length of a sample is -1"),
        ({"images": [[3, 0]] * 8, "text": [5] * 8}, CostError, "lengths of microbatch 0 are"),
        ({"images": [0] * 3, "text": [5] * 3}, PackingError, "3 sequences can't fill 4 microbatches"),
    ],
)
def test_lengths_of_towers_that_make_no_sense_are_refused(
    lengths: dict[str, list[int]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_batch(lengths, ps.build("1f1b", 4, 4), of_towers())
