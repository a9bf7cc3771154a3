"""What a result says of its run, its summary, and tables between the comments of a README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common.readme import between, markdown, write_between
from experiments.common.record import CHECKOUT, command, commit
from experiments.common.summary import save_summary

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def git(folder: Path, *words: str) -> str:
    by = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *by, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a source, a result and a page."""
    monkeypatch.delenv("PENSTOCK_COMMIT", raising=False)
    for name in ("src/a.py", "benchmarks/b/run.py", "benchmarks/b/results.json", "benchmarks/b/README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "All")
    return tmp_path


def test_a_commit_has_a_mark_where_sources_differ_and_not_where_results_and_pages_do(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert commit(checkout) == head
    for name in ("results.json", "README.md"):
        (checkout / "benchmarks/b" / name).write_text("2\n", encoding="utf-8")
    (checkout / "notes.txt").write_text("of no source\n", encoding="utf-8")
    assert commit(checkout) == head
    assert commit(checkout, ["."]) == f"{head}+"
    (checkout / "benchmarks/b/new.py").write_text("2\n", encoding="utf-8")
    assert commit(checkout) == f"{head}+"


def test_the_environment_says_the_commit_of_our_own_files_alone(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of two checkouts once would have had one commit for both."""
    monkeypatch.setenv("PENSTOCK_COMMIT", "0123456789" * 4)
    assert commit() == commit(CHECKOUT) == "0123456789" * 4
    assert commit(checkout) == git(checkout, "rev-parse", "HEAD")


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(checkout / "src") == "", "a wheel in somebody's repository is not of that repository's commit"
    monkeypatch.setenv("PATH", str(checkout))
    assert commit(checkout) == ""


def test_a_command_is_as_it_was_typed_at_the_root_but_for_where_results_go(tmp_path: Path) -> None:
    figure, run = (str(ROOT / name) for name in ("experiments/pipemorph/figure5.py", "benchmarks/uneven/run.py"))
    assert command([figure, "--jobs", "2", "--out=there"]) == "python -m experiments.pipemorph.figure5 --jobs 2"
    assert command([run, "--times", "--out", "there.json"]) == "python benchmarks/uneven/run.py --times"
    assert command([str(tmp_path / "mine.py"), "1"]) == "python mine.py 1"
    assert command(["/usr/bin/pytest", "-q"]) == "python -m pytest -q"


def test_records_are_imported_without_torch() -> None:
    code = "import sys, experiments.common.record, experiments.common.readme; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_table_is_put_between_its_comments_and_nowhere_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    page = "# A\n\n<!-- b -->\nold\n<!-- end of b -->\n\n<!-- c -->\n<!-- end of c -->\nend\n"
    readme.write_text(page, encoding="utf-8")
    lines = markdown(["", "x"], [["1", "2"]])
    write_between(readme, "c", lines)
    text = readme.read_text(encoding="utf-8")
    assert between(text, "c") == "|  | x |\n|---|---|\n| 1 | 2 |\n"
    assert between(text, "b") == "old\n"
    write_between(readme, "b", "\n".join(lines))
    text = readme.read_text(encoding="utf-8")
    assert between(text, "b") == between(text, "c")
    write_between(readme, "b", "old")
    write_between(readme, "c", "")
    assert readme.read_text(encoding="utf-8") == page


def test_a_page_without_the_comments_is_left_as_it_is(tmp_path: Path) -> None:
    """Several scripts wrote such a page anew and lost what came after its table."""
    readme = tmp_path / "README.md"
    for page in ("# A\n", "<!-- b -->\n| 1 |\nmore\n"):
        readme.write_text(page, encoding="utf-8")
        with pytest.raises(ValueError, match="has no comments <!-- b --> and <!-- end of b -->"):
            write_between(readme, "b", "| 2 |")
        assert readme.read_text(encoding="utf-8") == page


def test_a_summary_has_a_line_a_row_and_no_digits_that_say_nothing(tmp_path: Path) -> None:
    found = {"commit": "0123abc", "load": [1.5, 2.0], "rows": [{"ms": 10 / 3}, {"ms": float("nan")}], "by": {8: [1]}}
    save_summary(tmp_path / "results.json", found)
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert '\n "load": [1.5, 2.0],\n "rows": [\n  {"ms": 3.33333333},\n  {"ms": null}\n ],\n' in text
    assert json.loads(text) == {**found, "rows": [{"ms": 3.33333333}, {"ms": None}], "by": {"8": [1]}}


def test_a_summary_of_every_repeat_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    save_summary(path, {"rows": [[number] for number in range(96)]})
    text = path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"would have 104 lines and may have 100; put means.*of 'rows' there"):
        save_summary(path, {"rows": [[number] for number in range(100)]})
    assert path.read_text(encoding="utf-8") == text
