"""`penstock analyze`: one paragraph, one page that loads nothing, one JSON object."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from trace_samples import study_sample

pytestmark = pytest.mark.unit


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return study_sample(num_replicas=2, num_ranks=3, num_microbatches=6, slow_worker=(1, 2, 1.7)).write(
        tmp_path / "slow.parquet"
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main(["analyze", *map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return int(code or 0), said.out, said.err


def test_json_has_slowdown_causes_and_replay_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, trace, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert found["slowdown"] > 1.3
    assert found["replay_error"] < 1e-6
    first = found["causes"][0]
    assert (first["kind"], first["names"]) == ("worker", {"replica": 1, "rank": 2})
    assert first["cost_ms"] > 0
    assert found["causes"] == sorted(found["causes"], key=lambda each: -each["cost_ms"])
    assert found["out"] is None


def test_a_paragraph_and_a_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, trace, "--out", page)
    assert code == 0
    paragraph, wrote = out.strip().split("\n")
    assert wrote == f"wrote {page}"
    assert "the first cause is rank 2 of replica 1 (stage 2)" in paragraph
    text = page.read_text(encoding="utf-8")
    for title in ("Causes", "What if", "Steps", "Workers", "Microbatches", "One step", "The study's measures"):
        assert f"<h2>{title.replace(chr(39), '&#x27;')}</h2>" in text
    assert not re.search(r'(src|href)\s*=\s*"?https?:', text)
    assert "{{" not in text


def test_a_link_s_cost_ran_into_what_its_messages_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As "2 ms a message where others take 0 2 ms (4.7%)"."""
    slow = tmp_path / "slow.json"
    line = f"simulate 1f1b --ranks 4 --microbatches 8 --link 0:1=2 --timeline {slow}"
    assert main(line.split()) == 0
    capsys.readouterr()
    code, out, _ = run(capsys, slow, "--out", tmp_path / "page.html")
    assert code == 0
    each = r"[\d.]+ ms \(\d+\.\d%\) because of link . to . of replica 0, 2 ms a message where others take 0"
    assert re.search(rf"What each costs per step: {each}; {each}\.", out)


def test_one_pipeline_alone_cannot_tell_a_slow_stage_from_a_slow_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study_sample(num_replicas=1, slow_worker=(0, 1, 1.5)).write(tmp_path / "one.parquet")
    found = json.loads(run(capsys, path, "--json")[1])
    assert found["causes"][0]["names"] == {"stage": 1}
    assert "with one replica rank 1 may as well be slow" in found["causes"][0]["what"]


def test_steps_and_layers_are_taken(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, trace, "--only-steps", "10,12-13", "--layers", "4,4,4", "--json")[1])
    assert list(found["steps"]) == ["10", "12", "13"]
    assert any(each["what"].startswith("layers ") for each in found["what_ifs"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--out", "page.pdf"], 2, "give a name that ends with .html"),
        (["--only-steps", "10,a"], 2, "give whole numbers, like 12,20-23"),
        (["--column", "microbatch"], 2, "write OURS=THEIRS"),
        (["--only-steps", "99"], 1, "has no step 99"),
    ],
)
def test_misuse_says_what_to_do(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    ended, _, err = run(capsys, trace, *arguments)
    assert ended == code
    assert said in err
