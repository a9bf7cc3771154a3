"""The permutation is one: every number once, for every length and key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Batches
from penstock.data.shuffle import permuted

pytestmark = pytest.mark.property


@settings(deadline=None)
@given(length=st.integers(1, 700), key=st.tuples(st.integers(), st.integers()))
def test_every_number_once(length: int, key: tuple[int, int]) -> None:
    assert sorted(permuted(np.arange(length), length, *key).tolist()) == list(range(length))


@settings(deadline=None)
@given(length=st.integers(1, 2**50), seed=st.integers(0, 2**64), data=st.data())
def test_a_place_is_the_same_asked_alone(length: int, seed: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5)))
    numbers = permuted(places, length, seed)
    assert ((numbers >= 0) & (numbers < length)).all()
    assert numbers.tolist() == [permuted(places[i : i + 1], length, seed)[0] for i in range(len(places))]


@pytest.mark.slow
def test_places_are_spread_evenly_over_keys() -> None:
    counts = np.zeros((6, 6), dtype=int)
    for key in range(3000):
        counts[np.arange(6), permuted(np.arange(6), 6, key)] += 1
    # 500 expected in each cell, with a standard deviation of 20.
    assert np.abs(counts - 500).max() < 100


def test_a_place_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="place 5 of a permutation of 5"):
        permuted(np.array([5]), 5, 0)
    with pytest.raises(ValueError, match="at least 1"):
        permuted(np.array([0]), 0, 0)


@pytest.mark.slow
@settings(deadline=None)
@given(
    size=st.integers(2, 300),
    context=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_every_window_once(size: int, context: int, batch_size: int, seed: int, epoch: int) -> None:
    context = min(context, size - 1)
    batches = Batches(np.arange(size), batch_size, context, seed)
    first, last = epoch * batches.num_windows, (epoch + 1) * batches.num_windows
    rows = [
        int(start)
        for step in range(first // batch_size, (last - 1) // batch_size + 1)
        for sample, start in enumerate(batches[step].inputs[:, 0], step * batch_size)
        if first <= sample < last
    ]
    rows.sort()
    assert 0 <= rows[0] <= (size - 1) % context
    assert rows == [rows[0] + i * context for i in range(batches.num_windows)]
