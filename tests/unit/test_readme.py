"""The README: its first screen is what it should be, its examples and commands run, its words are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from documents import ROOT, blocks, broken_links, commands, missing_paths, run_page
from experiments.claims import readme
from experiments.common.readme import between

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_examples_and_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_page(README, tmp_path, monkeypatch, capsys) > 8


def test_first_screen_is_a_sentence_a_picture_two_commands_and_eight_lines() -> None:
    title, sentence, picture, *_ = TEXT.split("\n\n")
    assert title == "# Penstock"
    assert sentence.count(".") == 1
    assert re.fullmatch(r"<!-- made by: python docs/images/\w+\.py -->\n!\[[^]]+\]\(docs/images/\w+\.svg\)", picture)
    first, second, more, install = blocks(README)
    assert commands(first) == [["make", "train"], ["make", "test"]]
    assert len([line for line in second.text.splitlines() if line]) == 7
    assert second.line < 30
    assert len(commands(more)) == 6
    assert len(commands(install)) == 1
    assert TEXT.count("\n") < 80


def test_the_sentence_is_the_package_description() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert TEXT.split("\n\n")[1] == f"Penstock {project['description'][0].lower()}{project['description'][1:]}"


def test_figures_are_those_of_the_results() -> None:
    made = "".join(f"{line}\n" for line in readme.figures())
    assert between(TEXT, "figures") == made, "run python -m experiments.claims.readme"


def test_links_and_paths_exist() -> None:
    assert broken_links(README) == []
    assert missing_paths(README) == []


def test_the_first_page_links_every_tutorial() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"tutorials/{page.name}" in index for page in (ROOT / "docs" / "tutorials").glob("*.md"))
