"""A sample of the protocol of the whole loop, at night: the runs end, are judged, and nothing goes badly wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.adapt import cells, judge, run

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.alone,
    pytest.mark.nightly,
    pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads the machine's load from /proc"),
]
SAMPLE = ("emulated-quiet-60ms-from12-end", "emulated-quiet-none", "real-quiet-60ms-from12-end")
FAR = 0.25
"""Share of a run that may be lost here, since other tests may have left the machine busy."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAMPLE)
def test_two_seeds_of_a_cell(name: str, tmp_path: Path) -> None:
    assert run.main(["--out", str(tmp_path), "--cells", name, "--seeds", "2", "--any-load"]) == 0
    rows = run.rows_in(tmp_path / name)
    assert [row.get("dropped") for row in rows] == [None, None]
    cell = cells.CELLS[name]
    found = judge.judge_cell(cell.load, bool(cell.fault), cell.lasts, rows)
    assert found["worst"] > -FAR, json.dumps(rows)
    assert found["false_ms"] <= FAR * sum(row["run_ms"] for row in rows), json.dumps(rows)
    if cell.fault:
        assert found["answered"] > 0, json.dumps(rows)
        assert sum(row["recovered"] for row in rows) > 0, json.dumps(rows)
