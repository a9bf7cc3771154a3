"""How long documents are, and lengths drawn with a tail: their quantiles and mean, the same by the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.data import ByteTokenizer, DataError, long_tailed, prepare

pytestmark = pytest.mark.unit


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
    with pytest.raises(DataError, match=r"they must rise|no lengths with quantiles"):
        long_tailed(10, 100, 0, quantiles, longest)


def said(words: str, capsys: Any) -> Any:
    assert main([*words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_histogram_counts_documents_tokens_and_squares(tmp_path: Path, capsys: Any) -> None:
    for number, size in enumerate([1, 2, 3, 4, 5, 100, *[9] * 14]):
        (tmp_path / f"{number:02}.txt").write_text("a" * size)
    prepare(tmp_path, tmp_path / "pair", ByteTokenizer())  # each ends with a token of its own
    found = said(f"data lengths {tmp_path / 'pair.bin'}", capsys)
    assert (found["count"], found["num_tokens"], found["longest"]) == (20, 261, 101)
    rows = {row["up_to"]: row for row in found["histogram"]}
    assert {up_to: row["count"] for up_to, row in rows.items() if row["count"]} == {2: 1, 4: 2, 8: 2, 16: 14, 128: 1}
    assert rows[128]["share_of_tokens"] == pytest.approx(101 / 261)
    assert rows[128]["share_of_squares"] == pytest.approx(101**2 / (4 + 9 + 16 + 25 + 36 + 1400 + 101**2))
    cut = said(f"data lengths {tmp_path / 'pair.bin'} --context 40", capsys)
    assert (cut["what"], cut["num_tokens"], cut["longest"]) == ("sequences", 241, 40)
    assert main(["data", "lengths", str(tmp_path / "pair.bin")]) == 0
    text = capsys.readouterr().out
    assert "20 documents, 261 tokens: 13 in the mean, 101 at most" in text
    assert "#" * 40 in text


@pytest.mark.parametrize(
    ("mean", "seed", "message"),
    [
        (float("inf"), 0, "the longest may be"),
        (1e30, 0, "the longest may be"),
        (2048.0, -1, "the seed be at least 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(mean: float, seed: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        long_tailed(5, mean, seed)
