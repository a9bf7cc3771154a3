"""A run of `penstock train` or `emulate` ends with at most five lines. One is for W; report.json has the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from tiers import others_nightly

SMALL = "--ranks 4 --microbatches 4 --batch 8 --depth 6 --width 16 --heads 2 --context 8 --in-process --threads 1"


ENDS = {
    f"--schedule zb --steps 2 {SMALL}": ["run", "loss", "one step", "note", "wrote"],
    f"--schedule amdp --window 4 --steps 2 {SMALL}": ["run", "loss", "one pass", "updates", "wrote"],
    "emulate zb --ranks 2 --microbatches 12 --costs gpt2-7b --steps 2 --in-process": [
        "run",
        "iteration",
        "links",
        "wrote",
    ],
    f"--schedule 1f1b --steps 2 {SMALL} --link 0:1=latency:1ms": ["run", "loss", "one step", "wrote"],
    f"--schedule 1f1b --steps 12 {SMALL} --adapt": ["run", "loss", "one step", "links", "wrote"],
}
"""The options of runs, and the headings of the lines that they end with."""


@pytest.mark.slow
@pytest.mark.parametrize("options", others_nightly(ENDS, list(ENDS)[:3]))
def test_five_lines(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    headings = ENDS[options]
    is_emulated = options.startswith("emulate")
    begin = options if is_emulated else f"train {options} --data {text}"
    assert main([*begin.split(), "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == ""
    found = [line.split("  ")[0] for line in lines[1:]]
    if "--adapt" in options:  # a busy machine may make it note what it saw
        found = [heading for heading in found if heading != "note"]
    assert found == headings
    assert f"penstock report {tmp_path / 'run'} makes a page of it" in lines[-1]
    assert ("between F and B, as proved" in out) == ("amdp" in options)
    about_w = [line for line in lines if "W has little to do" in line]
    assert len(about_w) == ("--schedule zb" in options)
    assert all("runs much like 1f1b" in line for line in about_w)

    report = json.loads((tmp_path / "run" / "report.json").read_text())
    before, since = report["notices"][: report["said_before"]], report["notices"][report["said_before"] :]
    told = [line.removeprefix("note    ") for line in err.splitlines() if line.startswith("note")]
    assert told == before, "what is known before a run is said before it"
    assert len(since) == sum(line.startswith("note") for line in lines)
    if not is_emulated:
        assert len(report["peak_memory"]) == 1
        assert len(report["state"]) == 4
    if "--schedule zb" in options:
        assert [each["stage"] for each in report["deferred"]] == [0, 1, 2, 3]
        assert all(each["share"] < 0.5 and each["at_once"] for each in report["deferred"])


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text to learn, which is read faster than Python's library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} and {number * 7 % 10} are digits.\n" for number in range(2000)))
    return str(path)
