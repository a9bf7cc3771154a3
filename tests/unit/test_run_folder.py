"""A run's folder belongs to one run at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.folder import RunFolder
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
