"""Lengths drawn with a tail: their quantiles and mean, and the same ones by the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.uneven.long_tails import long_tailed


@pytest.mark.parametrize("quantiles", [(0.81, 0.88, 1.92), (0.5, 0.9, 1.8), (0.1, 0.6, 3.0)])
def test_drawn_lengths_have_the_quantiles_and_the_mean_that_were_asked_for(
    quantiles: tuple[float, float, float],
) -> None:
    lengths = long_tailed(200_000, 10_000, 1, quantiles)
    assert lengths.mean() == pytest.approx(10_000, rel=0.01)
    assert np.percentile(lengths, (5, 50, 95)) / 10_000 == pytest.approx(quantiles, rel=0.02)
    assert lengths.min() >= 1
    assert lengths.max() <= 40_000


def test_the_same_seed_draws_the_same() -> None:
    assert long_tailed(50, 100, 3).tolist() == long_tailed(50, 100, 3).tolist()
    assert long_tailed(50, 100, 3).tolist() != long_tailed(50, 100, 4).tolist()
    assert long_tailed(0, 100).tolist() == []
    assert long_tailed(1000, 1, 0).min() >= 1


@pytest.mark.parametrize(
    ("quantiles", "longest"),
    [((0.9, 0.8, 2.0), 4.0), ((0.8, 0.9, 5.0), 4.0), ((0.1, 0.2, 0.3), 1.0), ((0, 1, 2), 4.0)],
)
def test_quantiles_that_no_lengths_have_are_refused(quantiles: tuple[float, float, float], longest: float) -> None:
    with pytest.raises(ValueError, match=r"they must rise|no lengths with quantiles"):
        long_tailed(10, 100, 0, quantiles, longest)


@pytest.mark.parametrize(
    ("mean", "seed", "message"),
    [
        (float("inf"), 0, "the longest may be"),
        (1e30, 0, "the longest may be"),
        (2048.0, -1, "the seed be at least 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(mean: float, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        long_tailed(5, mean, seed)
