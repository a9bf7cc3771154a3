"""The split benchmark in small: a table, a file, and the peer it imports from torch's inside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.split import run as split

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


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
    (row,) = written["rows"]
    assert row["ours_ratio"] > 0
    assert row["torch_ratio"] > 0
