"""The bar for a trained model, against sums worked out by hand and a slow count."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from penstock.data import DataError, entropies
from penstock.data import entropy as module

pytestmark = pytest.mark.unit


def slow(train: list[int], validation: list[int], vocab_size: int) -> tuple[float, float]:
    """The docstring's formulas, one token at a time."""
    singles, pairs, firsts = Counter(train), Counter(pairwise(train)), Counter(train[:-1])

    def single(b: int) -> float:
        return (singles[b] + 1) / (len(train) + vocab_size)

    def pair(a: int, b: int) -> float:
        followers = len({second for first, second in pairs if first == a})
        if not firsts[a]:
            return single(b)
        return (pairs[a, b] + followers * single(b)) / (firsts[a] + followers)

    unigram = -sum(math.log(single(b)) for b in validation) / len(validation)
    following = list(pairwise(validation))
    return unigram, -sum(math.log(pair(a, b)) for a, b in following) / len(following)


@pytest.mark.parametrize("vocab_size", [12, 5000])
@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_counts_agree_with_a_slow_count(vocab_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    draw = np.random.default_rng(0)
    train, validation = draw.integers(0, 9, 400), draw.integers(0, 12, 90)
    found = entropies(train.astype(np.uint16), validation.astype(np.uint16), vocab_size)
    unigram, bigram = slow(train.tolist(), validation.tolist(), vocab_size)
    assert found.unigram == pytest.approx(unigram, rel=1e-12)
    assert found.bigram == pytest.approx(bigram, rel=1e-12)


@pytest.mark.parametrize(("vocab_size", "most"), [(256, 20), (5000, 20)])
def test_counting_a_text_took_sixty_megabytes_in_every_rank(vocab_size: int, most: int) -> None:
    """At the end of each run on text, above the weights; of bytes, and of more words than are counted in a table."""
    draw = np.random.default_rng(3).integers(0, 1000, 4_000_000) % 250
    text = draw.astype(np.uint16)
    tracemalloc.start()
    entropies(text[:-1000], text[-1000:], vocab_size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most * 1e6


def test_the_pair_model_is_a_distribution() -> None:
    train = np.array([0, 1, 2, 1, 0, 0, 3])
    for a in range(5):  # 4 never occurs, 3 has no follower
        total = 0.0
        for b in range(5):
            total += math.exp(-entropies(train, np.array([a, b]), 5).bigram)
        assert total == pytest.approx(1.0, abs=1e-12)


def test_known_sources() -> None:
    draw = np.random.default_rng(1)
    uniform = draw.integers(0, 8, 400_000).astype(np.uint8)
    found = entropies(uniform[:300_000], uniform[300_000:], 256)
    for value in (found.unigram, found.bigram, found.train_unigram, found.train_bigram):
        assert value == pytest.approx(math.log(8), abs=2e-3)
    cycle = np.tile(np.arange(10, dtype=np.uint8), 30_000)
    found = entropies(cycle[:200_000], cycle[200_000:], 256)
    assert found.unigram == pytest.approx(math.log(10), abs=2e-3)
    assert 0 < found.bigram < 1e-3
    assert found.train_bigram == 0.0


def test_a_large_vocabulary_seen_once_sets_no_dishonest_bar() -> None:
    # Random tokens have nothing to learn, yet counts of pairs that occur once claim to know the next one.
    draw = np.random.default_rng(2).integers(0, 5000, 30_000).astype(np.uint16)
    found = entropies(draw[:20_000], draw[20_000:], 5000)
    assert found.train_bigram < 2.0
    assert found.bigram > math.log(5000) - 0.1


def test_only_a_lower_loss_beats_the_bar() -> None:
    found = entropies(np.array([0, 1, 0, 1]), np.array([0, 1]), 2)
    assert found.beaten_by(found.bigram - 1e-6)
    assert not found.beaten_by(found.bigram)
    assert not found.beaten_by(math.nan)


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        ([0], [0, 1], "1 training tokens"),
        ([0, 1], [], "0 validation tokens"),
        ([0, 9], [0, 1], "token 9 in the data, outside the vocabulary of 4"),
        ([0, 1], [0, -1], "token -1 in the data"),
    ],
)
def test_too_little_or_foreign_data_is_refused(train: list[int], validation: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        entropies(np.array(train, dtype=np.int32), np.array(validation, dtype=np.int32), 4)
