"""The README: its first screen is what it should be, its examples and commands run, its words are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import penstock as ps
from documents import ROOT, blocks, broken_links, commands, missing_paths, run_page
from penstock.cli.run import application

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_examples_and_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_page(README, tmp_path, monkeypatch, capsys) > 10


def test_first_screen_is_a_sentence_a_picture_two_commands_and_five_lines() -> None:
    title, sentence, picture, *_ = TEXT.split("\n\n")
    assert title == "# Penstock"
    assert sentence.count(".") == 1
    assert re.fullmatch(r"<!-- made by: python docs/images/\w+\.py -->\n!\[[^]]+\]\(docs/images/\w+\.svg\)", picture)
    first, second, *_ = blocks(README)
    assert commands(first) == [["make", "train"], ["make", "test"]]
    assert second.language == "python"
    assert len([line for line in second.text.splitlines() if line]) == 5
    assert second.line + 7 < 40


def test_it_is_short() -> None:
    assert TEXT.count("\n") < 120


def test_the_sentence_is_the_package_description() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert TEXT.split("\n\n")[1] == f"Penstock {project['description'][0].lower()}{project['description'][1:]}"


def test_every_library_schedule_is_named() -> None:
    listed = " ".join(TEXT.split()).split("The library schedules are ")[1].split(". ")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(ps.library.SCHEDULES)


def test_every_verb_is_shown() -> None:
    shown = {words[1] for block in blocks(README) for words in commands(block) if words[0] == "penstock"}
    assert shown == set(get_command(application()).commands)  # type: ignore[attr-defined]


def test_links_and_paths_exist() -> None:
    assert broken_links(README) == []
    assert missing_paths(README) == []


def test_every_page_is_linked() -> None:
    """Tutorials are linked by the page that the site begins with."""
    assert all(f"docs/{page.name}" in TEXT for page in (ROOT / "docs").glob("*.md"))
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"tutorials/{page.name}" in index for page in (ROOT / "docs" / "tutorials").glob("*.md"))
