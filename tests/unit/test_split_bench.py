"""The split benchmark: plain rows, a table, a file, and the peer it imports from torch's inside."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.split import run as split

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


@pytest.mark.nightly
def test_rows_are_plain_data() -> None:
    (row,) = split.run(widths=(8,), blocks=(1,), repeats=2, batch=1, tokens=4)
    assert json.loads(json.dumps(row)) == row
    assert row["ours_ratio"] > 0
    assert row["torch_ratio"] > 0
    assert split.table([row]).count("\n") == 2


@pytest.mark.nightly
def test_a_torch_without_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    (row,) = split.run(widths=(8,), blocks=(1,), repeats=1, batch=1, tokens=4)
    assert row["torch_ratio"] is None
    assert "| - |" in split.table([row])


@pytest.mark.nightly
def test_the_file_says_what_it_was_measured_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    words = ["--width", "8", "--depth", "1", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [split.__file__, *words])
    split.main()
    assert capsys.readouterr().out.startswith("| width |")
    written = json.loads(out.read_text())
    assert written["command"] == "python benchmarks/split/run.py --width 8 --depth 1 --repeats 1"
    assert written["machine"]["torch"] == torch.__version__
    assert str(tmp_path) not in out.read_text()
