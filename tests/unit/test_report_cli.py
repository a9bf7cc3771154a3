"""`penstock report`: where it looks, what it writes, what it says of what cannot be reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.report.from_logs import read_story
from report_cases import Page, log_of

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "control.jsonl").write_text("\n".join(log_of()) + "\n", encoding="utf-8")
    (folder / "settings.json").write_text('{"device": "emulated", "link": ["2:3=latency:60ms"]}', encoding="utf-8")
    return folder


def test_the_verb_writes_the_page_into_the_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Link 2–3 was 60 ms late")
    assert printed[-1] == f"wrote {run / 'report.html'}"
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert page.data["name"] == "slow"
    assert page.data["facts"]["device"] == "emulated"


@pytest.mark.parametrize("first", [1, 101])
def test_bug_the_page_counted_iterations_from_0_where_the_run_counts_steps_from_1(
    run: Path, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    log = log_of()
    story = read_story(log, name="slow")
    (run / "report.json").write_text(f'{{"steered": {{"first": {first}}}}}', encoding="utf-8")
    assert main(["report", str(run)]) == 0
    printed, page = capsys.readouterr().out, Page((run / "report.html").read_text(encoding="utf-8"))
    assert page.data["iterations"]["number"][0] == first
    assert f"from iteration {story.spells[0].first + first}" in printed
    before, now = story.to_json()["decisions"], page.data["decisions"]
    for key in ("began", "made", "first"):
        assert [each[key] for each in now] == [None if each[key] is None else each[key] + first for each in before]


def test_the_page_and_the_json_may_be_had_together(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run / "page.html"
    assert main(["report", str(run.parent), "--out", str(target), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value.pop("out") == str(target)
    value.pop("headline")
    assert Page(target.read_text(encoding="utf-8")).data == value


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "no such folder"),
        (["."], 2, "has no metrics.jsonl and no control.jsonl"),
        (["slow", "--out", "page.svg"], 2, "a name that ends with .html"),
        (["slow", "--out", "nowhere/page.html"], 2, "No such file"),
        (["broken"], 1, "line 1 of the log is not JSON"),
        (["binary"], 1, "not text"),
        (["both"], 2, "holds 2 runs"),
    ],
)
def test_what_cannot_be_reported_is_said(
    arguments: list[str],
    code: int,
    message: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    for name, content in (("broken", b"x\n{}\n"), ("binary", b"\xff\xfe\n"), ("both/a", b"{}"), ("both/b", b"{}")):
        (run.parent / name).mkdir(parents=True)
        (run.parent / name / "control.jsonl").write_bytes(content)
    if arguments == ["."]:
        for path in (run / "control.jsonl", Path("broken/control.jsonl"), Path("binary/control.jsonl")):
            path.unlink()
    assert main(["report", *arguments]) == code
    assert message in capsys.readouterr().err
    assert main(["report", *arguments, "--json"]) == code
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]
