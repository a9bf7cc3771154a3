"""Which cases of a sweep run by day: a sample that is named, or whose turn it is; and all of them at night."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def by_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "NIGHTLY", False)


@pytest.fixture
def at_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "NIGHTLY", True)


@pytest.mark.usefixtures("by_day")
def test_by_day_a_sample_is_gone_through() -> None:
    assert [tiers.examples(num) for num in (5, 25, 80, 200)] == [5, 10, 10, 25]
    assert tiers.sample(1000, 200) == 200
    assert tiers.chosen({"a": 1, "b": 2, "c": 3}, ["c", "a"]) == {"a": 1, "c": 3}
    assert [tiers.in_turn("xyz", number) for number in range(4)] == [["x"], ["y"], ["z"], ["x"]]
    assert tiers.in_turn("uvwxyz", 5, 3) == ["z", "v", "x"]


@pytest.mark.usefixtures("at_night")
def test_at_night_everything_is() -> None:
    assert tiers.examples(200) == 200
    assert tiers.sample(1000, 200) == 1000
    assert tiers.chosen({"a": 1, "b": 2}, ["a"]) == {"a": 1, "b": 2}
    assert tiers.in_turn("xyz", 1, 2) == "xyz"


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.usefixtures("by_day")
def test_every_way_has_its_turn_and_none_twice_in_a_case(num: int) -> None:
    ways = ["a", "b", "c", "d", "e"]
    turns = [tiers.in_turn(ways, number, num) for number in range(len(ways))]
    assert all(len(set(turn)) == num for turn in turns)
    assert {way for turn in turns for way in turn} == set(ways)


def test_other_cases_are_marked() -> None:
    found = tiers.others_nightly([("a", 1), ("a", 2), ("b", 1)], [("a", 2)])
    assert [each.values for each in found] == [("a", 1), ("a", 2), ("b", 1)]
    assert [[mark.name for mark in each.marks] for each in found] == [["nightly"], [], ["nightly"]]


def test_a_sample_of_what_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="no case is"):
        tiers.others_nightly("abc", ["d"])
    with pytest.raises(KeyError, match="no case is named"):
        tiers.chosen({"a": 1}, ["b"])


def test_make_says_its_tier() -> None:
    """Or sweeps within a test would be samples at night too."""
    assert "\nexport TIER\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    code = "import tiers; print(tiers.NIGHTLY)"
    for tier, expected in (("full", "False"), ("nightly", "True")):
        environment = {**os.environ, "TIER": tier, "PYTHONPATH": str(ROOT / "tests")}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_what_runs_alone_is_marked_in_its_own_file() -> None:
    """Other files are not loaded for the phase of what runs alone, and the other phase leaves such tests out."""
    assert f'-m "{tiers.ALONE} ' in (ROOT / "Makefile").read_text(encoding="utf-8")
    shared = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    assert len(shared) > 50
    others = {path.name for path in shared if re.search(r"mark\.(alone|gpu)\b", path.read_text(encoding="utf-8"))}
    assert others == {"tiers.py"}, "a file that takes such a mark from there would not be loaded"


@pytest.mark.slow
def test_files_with_none_that_runs_alone_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "test_alone.py").write_text("import pytest\n\n\n@pytest.mark.alone\ndef test_it():\n    pass\n")
    (tmp_path / "test_other.py").write_text("raise RuntimeError('this was loaded')\n")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", f"{tiers.ALONE} and not nightly", "."]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 test collected" in done.stdout
