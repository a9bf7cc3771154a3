"""Where times are not given, the first line says what was assumed and which option to give; so does the JSON."""

from __future__ import annotations

import json
import shlex

import pytest

from penstock.cli import main

UNITS = "F = I = W = 1 ms per stage, 1 ms for each rank's share of the model; give --f, --i, --w or --costs"
COUNTS = "--ranks 2 --microbatches 4"
LAYOUT = "layout 'Et*3|(tt|)*6L' --ranks 4"


@pytest.mark.parametrize(
    ("words", "assumed"),
    [
        (f"simulate 1f1b {COUNTS}", UNITS),
        (f"plan {COUNTS} --time 1", UNITS),
        (f"plan {COUNTS} --stages 2 --placement all", UNITS.replace("per stage", "per part")),
        (f"simulate 1f1b {COUNTS} --f 2 --i 1", "W = 1 ms per stage, 1 ms for each rank's share of the model; "
         "give --w or --costs"),
        (f"simulate 1f1b {COUNTS} --f 2 --cost b=4", "I = W = half of B; give --i, --w or --costs"),
        (LAYOUT, "E = 0, t = 1, L = 1 ms for a forward of each such layer; give --times E=MS,t=MS,L=MS, measured "
         "where you train"),
        (f"{LAYOUT} --times t=2,E=0.1", "L = 0 ms for a forward of each such layer; give --times E=MS,t=MS,L=MS, "
         "measured where you train"),
    ],
)  # fmt: skip
def test_the_first_line_says_what_was_assumed(words: str, assumed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 0
    name, _, said = capsys.readouterr().out.partition("\n")[0].partition(" ")
    assert (name, said.strip()) == ("assumed", assumed)
    assert main([*shlex.split(words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == assumed


@pytest.mark.parametrize("words", [f"simulate 1f1b {COUNTS} --costs gpt2-7b", f"{LAYOUT} --times t=1,E=0,L=1.5"])
def test_given_times_assume_nothing(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 0
    assert "assumed" not in capsys.readouterr().out
    assert main([*shlex.split(words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] is None


def test_a_layout_is_judged_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(LAYOUT), "--json", "--microbatches", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*shlex.split(LAYOUT), "--json", "--microbatches", "8", "--times", "t=1,E=0,L=1"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert (found["judged"], found["better"]) == (given["judged"], given["better"])
    assert found["better"]["makespan"] < found["judged"]["makespan"]
