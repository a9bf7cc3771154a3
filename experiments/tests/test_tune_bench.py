"""The benchmark of the tuner: rounds, what counts as quiet, and the medians, with ranks that answer known numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tune_models
from benchmarks.tune import run as bench
from penstock.tune import meter, verify

pytestmark = pytest.mark.unit


class Restless(tune_models.Ranks):
    """Every second run is disturbed."""

    def __call__(self, tasks, *rest, **more):  # type: ignore[no-untyped-def]
        runs = sum(task["do"] == "run" for task in self.tasks)
        self._others = 1.5 if tasks[0]["do"] == "run" and runs % 2 else 0.0
        return super().__call__(tasks, *rest, **more)


def run(monkeypatch: pytest.MonkeyPatch, fake: tune_models.Ranks, rounds: int) -> dict[str, object]:
    monkeypatch.setattr(meter, "run_job", fake)
    monkeypatch.setattr(bench, "run_job", fake)
    monkeypatch.setattr(verify, "num_cores", lambda: 2)
    (row,) = bench.run(rounds, steps=2, seconds=0.01, settings=[bench.Setting("1f1b", 2, 1, 4)], patience=0.0)
    assert isinstance(row, dict)
    return row


def test_rounds_are_added_until_enough_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, Restless(), 3)
    assert (row["num_rounds"], row["num_quiet"]) == (5, 3)
    assert row["measured_ms"] == 51.0
    assert row["ratio"] == row["predicted_ms"] / 51.0
    assert row["off"] == abs(row["ratio"] - 1)


def test_without_a_quiet_round_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, tune_models.Ranks(others=1.0), 2)
    assert (row["num_rounds"], row["num_quiet"]) == (2 * bench.MOST_ROUNDS, 0)
    assert row["measured_ms"] == 51.0


def test_every_round_measures_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tune_models.Ranks()
    run(monkeypatch, fake, 2)
    assert [task["do"] for task in fake.tasks] == ["layers", "transfer", "run"] * 2


def test_the_table_and_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tune_models.Ranks()
    for module in (meter, bench):
        monkeypatch.setattr(module, "run_job", fake)
    monkeypatch.setattr(bench, "LOOK", 0.01)
    monkeypatch.setattr(bench, "others", lambda clocks: 0.0)
    out = tmp_path / "tune.json"
    monkeypatch.setattr(sys, "argv", [bench.__file__, "--rounds", "1", "--steps", "2", "--out", str(out)])
    bench.main()
    printed = capsys.readouterr().out
    assert "| zb-h1 | 2 x 1 | 8 of 2 |" in printed
    assert "| 1f1b | 1 x 2 | 2 of 4 |" in printed
    result = json.loads(out.read_text())
    assert result["command"] == "python benchmarks/tune/run.py --rounds 1 --steps 2"
    assert "commit" in result
    assert len(result["load"]) == 3
    assert all(len(row["ratios"]) == row["num_rounds"] for row in result["rows"])
    assert [(row["pp"], row["dp"]) for row in result["rows"]] == [(1, 1), *[(2, 1)] * 4, (1, 2)]
    assert all(row["worst"] >= row["off"] for row in result["rows"])
    assert result["rows"][1]["measured_bytes"] == 2000.0, "the higher of two ranks"
    assert str(tmp_path) not in out.read_text()


def test_every_round_of_a_run_that_was_ended_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = tune_models.Ranks(interrupt_at=7)  # each round is three tasks: two rounds are whole
    for module in (meter, bench):
        monkeypatch.setattr(module, "run_job", ended)
    monkeypatch.setattr(bench, "LOOK", 0.01)
    monkeypatch.setattr(bench, "others", lambda clocks: 0.0)
    out = tmp_path / "tune.json"
    words = ["--rounds", "2", "--steps", "2", "--setting", "1", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [bench.__file__, *words])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["pp"], row["num_rounds"]) for row in rows] == [(1, 1), (2, 1)]
