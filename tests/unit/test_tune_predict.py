"""Predicted steps and memory against what known costs must give."""

from __future__ import annotations

import json
from typing import Any

import pytest

import penstock as ps
from penstock.formats.profile import MessageCosts, Profile, profile_to_json, read_profile
from penstock.tune.memory import memory_of, peak_bytes
from penstock.tune.predict import predict, reduce_time, stage_costs
from penstock.tune.transfer import (
    ALONE,
    COPIES,
    REPLICAS,
    SIZES,
    AfterOps,
    measure_transfer,
    of_holders,
    rising_with_size,
    undisturbed,
)  # fmt: skip
from tune_models import profile, ranges, transfer

pytestmark = pytest.mark.unit


def plain(**changes: object) -> Profile:
    """Two layers of F 3, B 6, F split 4, I 4, W 2."""
    rows: dict[str, object] = {
        "f": [3.0, 3.0], "b": [6.0, 6.0], "f_split": [4.0, 4.0], "i": [4.0, 4.0], "w": [2.0, 2.0],
        "activation": [100.0, 60.0], "held": [40.0, 30.0], "output": [8.0, 0.0], "weight": [10.0, 20.0],
        "state": [20.0, 40.0], "update": [1.0, 5.0],
    }  # fmt: skip
    return profile(2, **{**rows, **changes})


def test_one_rank_takes_its_ops_its_update_and_what_a_step_costs_besides() -> None:
    told = predict(ps.build("1f1b", 1, 4), ranges(2), plain(step=0.25), transfer(step_alone=0.5, step=100.0))
    assert told.makespan == 4 * (6 + 12)
    assert told.update == 6
    assert told.step == told.makespan + 6 + 0.5 + 0.25
    assert told.bubble_ratio == 0


def test_two_ranks_take_the_simulated_time() -> None:
    schedule = ps.build("1f1b", 2, 4)
    told = predict(schedule, ranges(1, 1), plain(), transfer(delay=2.0, step=0.5))
    expected = ps.simulate(schedule, ps.Costs(f=[3, 3], i=[4, 4], w=[2, 2]), links=ps.Links({(0, 1): 2.0}))
    assert told.makespan == expected.makespan
    assert told.step == expected.makespan + 5 + 0.5  # the slowest rank's update


def test_a_split_backward_has_its_own_forward() -> None:
    schedule = ps.build("zb-h1", 2, 4)
    told = predict(schedule, ranges(1, 1), plain(), transfer())
    expected = ps.simulate(schedule, ps.Costs(f=[4, 4], i=[4, 4], w=[2, 2]))
    assert told.makespan == expected.makespan


def test_delay_is_from_op_to_op_however_it_is_shared_out() -> None:
    """F, message, F, gap, B, message, B, gap: 10 ms from op to op, sending, receiving and the gap within."""
    schedule = ps.build("1f1b", 2, 1)
    told = predict(schedule, ranges(1, 1), plain(), transfer(send=1.0, receive=2.0, delay=10.0, gap=0.5))
    assert told.makespan == 3 + 10 + 3 + 0.5 + 6 + 10 + 6 + 0.5


def test_sending_holds_up_the_sender() -> None:
    """Under gpipe rank 0 runs its forwards one after another, each followed by its send."""
    schedule = ps.build("gpipe", 2, 3)
    costs = stage_costs(schedule, ranges(1, 1), plain(), transfer(send=1.0, receive=2.0, delay=3.0))
    assert costs.f == (4.0, 5.0)
    assert costs.b == (8.0, 7.0)


def test_what_carries_messages_takes_from_the_ranks_where_every_core_has_one() -> None:
    schedule, links = ps.build("gpipe", 2, 3), transfer(send=1.0, receive=2.0, delay=9.0, threads=0.25)
    costs = stage_costs(schedule, ranges(1, 1), plain(), links, crowded=True)
    assert (costs.f, costs.b) == ((4.25, 5.25), (8.25, 7.25))
    free = predict(schedule, ranges(1, 1), plain(), links, num_devices=3)
    assert free.makespan == predict(schedule, ranges(1, 1), plain(), links).makespan
    full = predict(schedule, ranges(1, 1), plain(), links, num_devices=2)
    # Two forwards on rank 0 before its last, and two backwards after its first; a message waited for takes no longer.
    assert full.makespan - free.makespan == pytest.approx(4 * 0.25)


def test_a_message_waits_for_those_before_it() -> None:
    """Of the delay, 1 ms is latency. The rest keeps the link busy, unless it counts as time of the ops."""
    schedule, told = ps.build("gpipe", 2, 4), plain(output=[100.0, 0.0])
    none, send = (0.0, 0.0), (0.0, 5.0)
    links = MessageCosts((0.0, 100.0), send, none, (1.0, 51.0), none, none)
    costs = stage_costs(schedule, ranges(1, 1), told, links)
    late = ps.Links({(0, 1): "latency:1ms+occupancy:45ms"})
    makespan = predict(schedule, ranges(1, 1), told, links).makespan
    assert makespan == ps.simulate(schedule, costs, late).makespan > 2 * 4 * 45


def test_stages_of_one_rank_send_nothing() -> None:
    schedule = ps.build("zb-v", 2, 4)
    told = profile(4, f_split=[1.0] * 4, i=[1.0] * 4, w=[1.0] * 4)
    costs = stage_costs(schedule, ranges(1, 1, 1, 1), told, transfer(send=1.0, receive=2.0, delay=3.0))
    assert costs.f == (2.0, 3.0, 2.0, 3.0)  # 0 sends; 1 receives and stays; 2 sends; 3 receives
    assert costs.i == (3.0, 2.0, 3.0, 2.0)


def test_what_every_op_costs_comes_once_a_stage() -> None:
    schedule, told = ps.build("1f1b", 1, 2), plain(op_overhead={"f": 0.5, "b": 0.25})
    costs = stage_costs(schedule, ranges(2), told, transfer())
    assert (costs.f, costs.b) == ((6.5,), (12.25,))


def test_more_ranks_than_devices_take_at_least_all_their_work() -> None:
    schedule = ps.build("1f1b", 2, 4)
    told = predict(schedule, ranges(1, 1), plain(), transfer(), num_devices=1)
    assert told.makespan == 2 * 4 * 9
    twice = predict(schedule, ranges(1, 1), plain(), transfer(), num_copies=2, num_devices=2)
    assert twice.makespan == 2 * 2 * 4 * 9 / 2


@pytest.mark.parametrize(("copies", "expected"), [(1, 0.0), (2, 20.0), (4, 30.0)])
def test_copies_reduce_their_gradients_in_a_ring(copies: int, expected: float) -> None:
    """The rank with most gradients counts; over k copies 2 (k - 1) / k of them pass through each rank."""
    links = MessageCosts([0.0, 100.0], [0, 0], [0, 0], [0, 0], [0.0, 100.0], [0, 0])
    assert reduce_time(ps.build("1f1b", 2, 4), ranges(1, 1), plain(), links, copies) == pytest.approx(expected)


def test_copies_of_stages_send_gradients_to_their_owners_and_get_its_values() -> None:
    schedule = ps.build("dualpipe", 2, 4)
    told = profile(2, weight=[10.0, 20.0])
    nothing = [0.0, 0.0]
    links = MessageCosts(
        [0.0, 100.0], nothing, nothing, nothing, [0.0, 7.0], nothing, sums=[0.0, 100.0], values=[0.0, 50.0]
    )
    assert reduce_time(schedule, ranges(1, 1), told, links, 1) == pytest.approx(10 + 20 + 5 + 10)
    assert reduce_time(ps.build("1f1b", 2, 4), ranges(1, 1), told, links, 1) == 0.0


def test_bug_what_copies_exchange_was_priced_for_sixteen_tensors_whatever_a_stage_has() -> None:
    """Stages of 40 and 60 tensors; both ranks hold both."""
    told = profile(2, weight=[10.0, 20.0], tensors=[40.0, 60.0])
    none, each = [0.0, 0.0], {"sums": 0.5, "values": 0.25, "reduce": 0.125}
    by_size = {"sums": [2.0, 102.0], "values": [1.0, 51.0]}
    links = MessageCosts([0.0, 100.0], none, none, none, none, none, **by_size, per_tensor=each)
    both = (2 + 10) + (2 + 20) + (1 + 5) + (1 + 10) + 100 * (0.5 + 0.25)
    assert reduce_time(ps.build("chimera", 2, 4), ranges(1, 1), told, links, 1) == pytest.approx(both)
    assert reduce_time(ps.build("1f1b", 1, 4), ranges(2), told, links, 2) == pytest.approx(100 * 0.125)
    assert reduce_time(ps.build("1f1b", 1, 4), ranges(2), told, links, 4) == pytest.approx(100 * 0.125)


def test_what_is_exchanged_is_measured_by_bytes_and_by_tensors() -> None:
    """Steps that take 3 and 1 ms beside; copies 5 us a KiB and 0.1 ms a tensor more, and replicas half of that."""
    asked = []

    def after_ops(held_by: str, num_tensors: int, size: int) -> AfterOps:
        asked.append((held_by, num_tensors, size))
        more = 0.005 * size / 1024 + 0.1 * num_tensors
        both = {ALONE: 0.0, COPIES: 2 * more, REPLICAS: more / 2}[held_by]  # each rank has two copies, or one stage
        return AfterOps(3.0 + both, 1.0 + (0.5 if held_by == COPIES else 0.0) * both)

    rows, per_tensor = of_holders(after_ops)
    assert per_tensor == pytest.approx({"sums": 0.1, "values": 0.05, "reduce": 0.05})
    in_kib = [size / 1024 for size in SIZES]
    assert rows["sums"] == pytest.approx([0.005 * size for size in in_kib])
    assert rows["values"] == pytest.approx([0.0025 * size for size in in_kib])
    assert rows["reduce"] == pytest.approx([0.0025 * size for size in in_kib])
    assert len(asked) == len(set(asked)) == 3 * (len(SIZES) + 1)


def test_a_disturbed_exchange_costs_no_less_than_nothing() -> None:
    rows, per_tensor = of_holders(lambda held_by, num, size: AfterOps(5.0 if held_by == ALONE else 4.0, 1.0))
    assert set(per_tensor.values()) == {0.0}
    assert all(value == 0.0 for row in rows.values() for value in row)


def test_bug_the_optimizer_ran_for_copies_that_others_step() -> None:
    """Both ranks have both stages, and each steps and keeps the state of its own alone."""
    told = plain()
    one, both = (predict(ps.build(name, 2, 4), ranges(1, 1), told, transfer()) for name in ("1f1b", "chimera"))
    assert both.update == one.update == 5.0
    assert [memory.optimizer for memory in both.memory] == [memory.optimizer for memory in one.memory] == [20.0, 40.0]
    assert [memory.weights for memory in both.memory] == [30.0, 30.0]


def test_files_without_copies_take_messages_for_them() -> None:
    links = MessageCosts((0.0, 100.0), (0, 0), (0, 0), (1.0, 3.0), (0, 0), (0, 0))
    assert (links.at("sums", 50.0), links.at("values", 50.0)) == (4.0, 2.0)


def test_tied_weights_travel_with_every_backward() -> None:
    schedule = ps.build("1f1b", 2, 2)
    links = transfer(send=1.0, receive=2.0, delay=9.0)
    without = stage_costs(schedule, ranges(1, 1), plain(), links)
    tied = stage_costs(schedule, ranges(1, 1), plain(tied=20.0), links)
    assert [a - b for a, b in zip(tied.b, without.b)] == [2.0, 1.0]
    more = predict(schedule, ranges(1, 1), plain(tied=20.0), links)
    assert more.step - more.makespan == 5 + 9


def test_memory_follows_the_order_of_the_ops() -> None:
    F, B, I, W = (ps.Op(kind, 0, 0) for kind in "FBIW")
    assert peak_bytes([F, F, B, B], [100.0], [40.0]) == 200
    assert peak_bytes([F, I, F, W, I, W], [100.0], [40.0]) == 140
    assert peak_bytes([F, I, W], [10.0], [40.0]) == 40  # recompute: I leaves more than F


def test_memory_counts_weights_gradients_state_and_messages() -> None:
    first, second = memory_of(ps.build("1f1b", 2, 4), ranges(1, 1), plain())
    assert (first.weights, first.gradients, first.optimizer, first.activations) == (10, 10, 20, 200)
    assert (second.weights, second.gradients, second.optimizer, second.activations) == (20, 20, 40, 60)
    assert first.messages == second.messages == 4 * 8
    assert first.total == 10 + 10 + 20 + 200 + 32
    (alone,) = memory_of(ps.build("1f1b", 1, 4), ranges(2), plain())
    assert (alone.weights, alone.activations, alone.messages) == (30, 160, 0)


def test_a_tied_weight_counts_once_on_one_rank() -> None:
    (alone,) = memory_of(ps.build("1f1b", 1, 4), ranges(2), plain(tied=6.0))
    assert (alone.weights, alone.gradients, alone.optimizer) == (24, 24, 48)
    assert sum(m.weights for m in memory_of(ps.build("1f1b", 2, 4), ranges(1, 1), plain(tied=6.0))) == 30


def test_a_disturbed_size_counts_as_the_next_larger_one() -> None:
    assert rising_with_size([5.0, 1.0, 2.0, 9.0, 3.0]) == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert undisturbed([4.0, 1.0, 2.0, 3.0, 100.0]) == 2.0
    assert undisturbed([4.0]) == 4.0


def test_message_times_lie_between_known_sizes() -> None:
    links = MessageCosts((10.0, 20.0, 40.0), (0,) * 3, (0,) * 3, (1.0, 2.0, 6.0), (0,) * 3, (0,) * 3)
    assert [links.at("delay", size) for size in (0, 10, 15, 20, 30, 40, 50)] == [1, 1, 1.5, 2, 4, 6, 8]
    assert (links.latency, links.bandwidth) == (1.0, 6.0)
    assert transfer(delay=3.0).at("delay", 1e9) == 3.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"f": [1.0, -1.0]}, r"'profiles\[0\].f\[1\]': expected a list with one number of at least 0 .*, got -1.0"),
        ({"b": [1.0]}, "b has 1 entries; give one per layer, 2 in all"),
        ({"activation": "12"}, 'expected a list with one number of at least 0 per layer, got "12"'),
        ({"microbatch_size": 0}, "expected a whole number of at least 1, got 0"),
        ({"op_overhead": {"x": 1.0}}, "op_overhead has no kind 'x'; it has f, b, f_split, i, w"),
        ({"layers": []}, "expected a list with the name of each layer"),
        ({"speed": 1}, "'profiles\\[0\\].speed' is unknown"),
        ({"held": None}, "'profiles\\[0\\].held' is missing"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    file = json.loads(profile_to_json([plain()], {}))
    file["profiles"][0] = {k: v for k, v in {**file["profiles"][0], **changes}.items() if v is not None}
    with pytest.raises(ps.CostError, match=said):
        read_profile(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": [2.0, 1.0]}, r"sizes are \[2.0, 1.0\]; give each above the one before"),
        ({"send": [1.0]}, "send has 1 entries; give one per size, 2 in all"),
        ({"per_tensor": {"words": 0.5}}, "no kind 'words'; it has reduce, sums, values"),
        ({"per_tensor": {"sums": -1.0}}, r"'transfers\[...\].per_tensor': expected .*>= 0.0"),
    ],
)
def test_messages_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    file = json.loads(profile_to_json([plain()], {2: MessageCosts.assumed(1.0)}))
    file["transfers"]["2"] |= changes
    with pytest.raises(ps.CostError, match=said):
        read_profile(file)


def test_a_profile_reads_back() -> None:
    told = plain(op_overhead={"f": 0.5}, tied=3.0)
    links = transfer(delay=2.0, step=1.0, per_tensor={"sums": 0.5})
    file = json.loads(profile_to_json([told], {2: links}))
    read = read_profile(file)
    assert (read.profiles, read.transfers) == ((told,), {"2": links})
    del file["profiles"][0]["tensors"]
    file["version"] = 1
    (old,) = read_profile(file).profiles
    assert (old.tensors, old.total("tensors", range(2))) == ((), 0.0)


def test_bug_time_of_other_threads_between_two_readings_of_a_clock_was_below_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clocks of a process and of a thread are read one after the other, so a difference may be negative."""
    timeline = ps.simulate(ps.build("gpipe", 2, 2), ps.Costs.uniform(2))
    monkeypatch.setattr("penstock.tune.transfer._steps", lambda *_: ([timeline], 0.0, -0.001))
    monkeypatch.setattr("penstock.tune.transfer._after_ops", lambda *_: AfterOps(0.0, 0.0))
    found = measure_transfer(0, 2, 4, lambda: None)
    assert found["threads"] == [0.0] * len(found["sizes"])
