"""A run's folder belongs to one run at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.train import job, run_job
from penstock.train.folder import RunFolder
from penstock.train.job import TrainJob
from penstock.train.settings import SettingsError

pytestmark = pytest.mark.unit


def test_two_runs_at_once_wrote_into_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    with folder.made():
        folder.settings.write_text("{}")
        with (
            pytest.raises(SettingsError, match=r"one is being written by another run; wait until that has ended, or"),
            RunFolder(folder.path).made(),
        ):
            pass
        assert folder.settings.exists()
    with folder.made():  # free again
        folder.settings.unlink()
    assert not folder.path.exists()


def test_a_run_that_ended_between_the_look_for_a_folder_and_its_lock_was_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that were started at once the second one took the first one's folder for new."""
    monkeypatch.chdir(tmp_path)

    check = run_job.checked

    def meanwhile(order: TrainJob) -> Any:
        (found,) = asked
        (found / "checkpoints" / "step-00000002").mkdir(parents=True)
        (found / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
        return check(order)

    asked: list[Path] = []
    monkeypatch.setattr(job, "free_folder", lambda parent, name: asked.append(parent / name) or RunFolder(asked[0]))
    monkeypatch.setattr(run_job, "checked", meanwhile)
    line = "train --schedule 1f1b --ranks 2 --microbatches 2 --steps 1"
    small = " --preset nano --depth 2 --width 16 --heads 2 --context 16 --batch 4 --in-process"
    assert main(f"{line}{small}".split()) == 2
    assert "holds a run; go on with --resume" in capsys.readouterr().err
    assert (asked[0] / "metrics.jsonl").read_text().count("\n") == 2


def test_a_run_that_failed_leaves_its_folder_free(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one")

    def fail() -> None:
        with folder.made():
            folder.settings.write_text("{}")
            raise ValueError("too wide")

    with pytest.raises(ValueError, match="too wide"):
        fail()
    with folder.made():
        assert folder.settings.exists()
