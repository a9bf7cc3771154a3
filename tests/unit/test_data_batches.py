"""Batches: each window once an epoch, any step at once, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.data import Batches, DataError, to_tensors, validation_batches
from penstock.data.shuffle import mix

pytestmark = pytest.mark.unit

TOKENS = np.arange(1001, dtype=np.uint16)


def test_targets_are_the_inputs_one_token_on() -> None:
    inputs, targets = Batches(TOKENS, batch_size=3, context=16)[5]
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, inputs + 1)
    assert inputs.flags.c_contiguous
    assert targets.flags.c_contiguous


def test_every_epoch_takes_every_window_once_in_its_own_order() -> None:
    batches = Batches(TOKENS, batch_size=5, context=10, seed=1)
    assert batches.num_windows == 100
    epochs = [[int(i) for step in range(20) for i in batches[step + 20 * e].inputs[:, 0]] for e in range(3)]
    for starts in epochs:
        assert sorted(starts) == list(range(0, 1000, 10))
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_over_the_end_of_an_epoch_takes_from_both() -> None:
    one = Batches(TOKENS, batch_size=1, context=10, seed=2)
    whole = Batches(TOKENS, batch_size=30, context=10, seed=2)
    for step in range(12):
        rows = np.concatenate([one[30 * step + i].inputs for i in range(30)])
        assert np.array_equal(whole[step].inputs, rows)


def test_spare_tokens_shift_where_an_epoch_begins() -> None:
    batches = Batches(TOKENS[:996], batch_size=99, context=10)
    offsets = {int(batches[epoch].inputs[:, 0].min()) for epoch in range(60)}
    assert offsets == set(range(6))


def test_seed_and_step_decide_alone() -> None:
    same = [Batches(TOKENS, 4, 10, seed=3)[7].inputs for _ in range(2)]
    assert np.array_equal(*same)
    assert not np.array_equal(same[0], Batches(TOKENS, 4, 10, seed=4)[7].inputs)
    # Written down: a resumed run on another machine, or another numpy, must see the same windows.
    assert Batches(TOKENS, 4, 10, seed=3)[7].inputs[:, 0].tolist() == [720, 430, 70, 530]
    assert mix(3, 0, -1) == 5882830971275884169


def test_exactly_one_window_is_enough_and_one_token_less_is_not() -> None:
    assert Batches(TOKENS[:11], 2, 10)[3].inputs[:, 0].tolist() == [0, 0]
    with pytest.raises(DataError, match="10 tokens of data; a window of context 10 needs 11"):
        Batches(TOKENS[:10], 2, 10)
    with pytest.raises(DataError, match="0 tokens of data"):
        validation_batches(TOKENS[:0], 2, 10, 1)


@pytest.mark.parametrize(("batch_size", "context"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_refused(batch_size: int, context: int) -> None:
    with pytest.raises(DataError, match="at least 1"):
        Batches(TOKENS, batch_size, context)
    with pytest.raises(DataError, match="at least 1"):
        validation_batches(TOKENS, batch_size, context, 1)


def test_steps_before_the_first_are_refused() -> None:
    with pytest.raises(IndexError, match="step -1"):
        Batches(TOKENS, 4, 10)[-1]


@pytest.mark.parametrize("wrong", [-1, 50])
def test_a_token_outside_the_vocabulary_is_named_with_its_position(wrong: int) -> None:
    tokens = np.zeros(21, dtype=np.int32)
    tokens[13] = wrong
    batches = Batches(tokens, 2, 10, vocab_size=50)
    with pytest.raises(DataError, match=rf"token {wrong} at position 13 of the data, outside the vocabulary"):
        batches[0]
    tokens[13] = 49
    assert batches[0].inputs.max() == 49


def test_validation_batches_are_fixed_full_and_spread_over_all_tokens() -> None:
    batches = validation_batches(TOKENS, batch_size=4, context=10, num_batches=5)
    starts = np.concatenate([batch.inputs[:, 0] for batch in batches])
    assert starts.shape == (20,)
    assert (starts[0], starts[-1]) == (0, 990)
    assert np.diff(starts).min() >= 10
    assert np.array_equal(batches[2].targets, batches[2].inputs + 1)


def test_validation_on_little_data_stays_full_and_never_empty() -> None:
    few = validation_batches(TOKENS[:101], batch_size=4, context=10, num_batches=50)
    assert [batch.inputs.shape for batch in few] == [(4, 10)] * 2
    least = validation_batches(TOKENS[:15], batch_size=4, context=10, num_batches=50)
    assert [batch.inputs[:, 0].tolist() for batch in least] == [[0, 1, 2, 4]]


def test_tensors_share_the_numbers() -> None:
    batch = Batches(TOKENS, 2, 10)[0]
    inputs, targets = to_tensors(batch)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert inputs.data_ptr() == batch.inputs.ctypes.data
