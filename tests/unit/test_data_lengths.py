"""The histogram of how long documents are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.data import ByteTokenizer, prepare

pytestmark = pytest.mark.unit


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
