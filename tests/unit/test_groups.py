"""Tests of one group are run by one worker, and so are those of a file that share what it makes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from groups import group_of_file

TESTS = Path(__file__).parents[1]
CONFTEST = """
import pytest
from groups import scheduler


@pytest.hookimpl
def pytest_xdist_make_scheduler(config, log):
    return scheduler(config, log)


def pytest_configure(config):
    config.addinivalue_line("markers", "xdist_group: of xdist")
"""
GROUPED = """
import pytest


@pytest.mark.xdist_group("lab")
@pytest.mark.parametrize("number", range(4))
def test_it(number):
    pass
"""
SHARED = """
import pytest


@pytest.fixture(scope="module")
def dear():
    return 1


@pytest.mark.parametrize("number", range(4))
def test_it(dear, number):
    pass
"""


@pytest.mark.slow
def test_one_worker_has_a_group(tmp_path: Path) -> None:
    """Under pytest 9.2, xdist handed a group out test by test, and said nothing: the site was built twice."""
    for name, text in {
        "conftest": CONFTEST,
        "test_one": GROUPED,
        "test_other": GROUPED,
        "test_sharing": SHARED,
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    ran = re.findall(r"\[(gw\d)\].* PASSED (test_\w+)\.py::", told)
    assert len(ran) == 12, told
    workers = {
        name: {worker for worker, file in ran if file == name} for name in ("test_one", "test_other", "test_sharing")
    }
    assert workers["test_one"] == workers["test_other"]
    assert [len(each) for each in workers.values()] == [1, 1, 1]
    assert workers["test_sharing"] != workers["test_one"], "two groups are enough for both workers"


def test_the_groups_there_are() -> None:
    found = {
        path.stem: group_of_file(path) for path in sorted(TESTS.rglob("test_*.py")) if path.stem != "test_groups"
    }
    named = {name for name in found.values() if name and not name.endswith(".py")}
    assert named == {"browser", "lab", "layout", "wheel"}
    assert found["test_pages_in_browser"] == found["test_play_page"] == "browser"
    assert found["test_train_bad_input"]
    assert found["test_tiers"] is None


def test_a_file_is_of_one_group(tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(GROUPED + GROUPED.replace("lab", "browser"))
    with pytest.raises(ValueError, match="has the groups browser, lab"):
        group_of_file(tmp_path / "test_both.py")
