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
FEW = 6
"""Changes that a run of a few dozen steps may make, whatever else keeps the machine busy."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAMPLE)
def test_two_seeds_of_a_cell(name: str, tmp_path: Path) -> None:
    assert run.main(["--out", str(tmp_path), "--cells", name, "--seeds", "2", "--any-load"]) == 0
    rows = run.rows_in(tmp_path / name)
    assert [row.get("dropped") for row in rows] == [None, None]
    cell = cells.CELLS[name]
    for number, row in enumerate(rows):
        seed = run.read_seed(tmp_path / name / f"run-{number:02d}", cells.WARMUP[cell.device])
        assert {len(steps) for steps in (seed.oracle, seed.without, seed.adapting)} == {cell.num_steps}
        assert row["decisions"] <= FEW, json.dumps(row)
    found = judge.judge_cell(cell.load, bool(cell.fault), cell.lasts, rows)
    if cell.fault:
        said = [line for each in (tmp_path / name).glob(f"run-*/with/{cells.CONTROL}") for line in each.open()]
        is_explained = any('"unanswered"' in line or '"verdict"' in line for line in said)
        assert found["answered"] > 0 or is_explained, json.dumps(rows)
