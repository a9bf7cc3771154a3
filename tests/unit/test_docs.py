"""The pages of docs/: every example runs, every command works, every link, path, option and name is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import penstock as ps
from documents import PAGES, ROOT, SITE, Block, blocks, broken_links, missing_paths, prose, run_page
from penstock.cli.run import application
from processes import as_under_torchrun, run_ranks_to_end

OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
TORCHRUN = [block for page in [*PAGES, *OTHERS] for block in blocks(page) if block.more.startswith("torchrun=")]
READMES = sorted(
    [*(ROOT / "experiments").rglob("README.md"), *(ROOT / "benchmarks").rglob("README.md"), SITE / "README.md"]
)
RUN_HERE = ("python", "sh", "console")
EXAMPLES = [page for page in PAGES if any(each.language in RUN_HERE and not each.more for each in blocks(page))]
NOT_LISTED = {
    "--help", "--help-all", "--update-golden", "--extra-index-url", "--minutes",
    "--max-restarts", "--nproc-per-node", "--rdzv-endpoint",  # which torchrun has
}  # fmt: skip

every_page = pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.stem)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*EXAMPLES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_examples_and_commands_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_page(page, tmp_path, monkeypatch, capsys) > 0


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("block", TORCHRUN, ids=lambda block: block.page.stem)
def test_examples_for_several_processes_run(block: Block, tmp_path: Path) -> None:
    """With what torchrun gives its processes; under itself runs `tests/multiproc/test_launch_torchrun.py`."""
    script = tmp_path / "example.py"
    script.write_text(block.text, encoding="utf-8")
    count = int(block.more.removeprefix("torchrun="))
    printed = forked(script, count)
    said = dict(re.findall(r"(rank \d+): (\d+\.\d{6})", printed))
    assert len(said) == count
    assert len(set(said.values())) == 1, "the loss is the same on every rank"


def forked(script: Path, count: int) -> str:
    outcomes = run_ranks_to_end(count, as_under_torchrun, str(script))
    return "".join(each.text for each in outcomes)


@every_page
def test_shown_parts_of_examples_are_in_them(page: Path) -> None:
    for block in blocks(page):
        if block.more.startswith("from="):
            (file,) = (ROOT / "examples").rglob(block.more.removeprefix("from="))
            assert block.text in file.read_text(encoding="utf-8"), block.where


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page: Path) -> None:
    assert broken_links(page) == []


def test_a_page_that_only_the_site_has_is_no_target_by_itself() -> None:
    """As "gallery.md", on which a reader of the repository finds nothing."""
    page = ROOT / "docs" / "not-there.md"
    targets = [
        "gallery.md",
        "site/README.md#gallery.md",
        "site/README.md#galery.md",
        "site/README.md#papers/amdp.md/x",
    ]
    text = " ".join(f"[a]({target})" for target in targets)
    assert broken_links(page, text) == ["gallery.md", "site/README.md#galery.md"]


@every_page
def test_named_files_exist(page: Path) -> None:
    assert missing_paths(page) == []


@every_page
def test_named_options_exist(page: Path) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", prose(page)))
    assert named - all_options() - NOT_LISTED == set()


@every_page
def test_named_parts_of_the_interface_exist(page: Path) -> None:
    named = set(re.findall(r"\bps\.([A-Za-z_]+)", page.read_text(encoding="utf-8")))
    assert {name for name in named if not hasattr(ps, name)} == set()


@every_page
def test_no_place_is_named_that_only_one_machine_has(page: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|home|tmp|root|mnt)\b", page.read_text(encoding="utf-8")) == []


@cache
def all_options() -> set[str]:
    return options(get_command(application()))


def options(command: Any) -> set[str]:
    """The options of a verb and of the verbs below it."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options(verb) for verb in getattr(command, "commands", {}).values()))
