"""Schedules with updates on the command line: what is built, told and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.cli.check import READS
from penstock.schedule.updates import NEWEST, RULES

pytestmark = pytest.mark.unit

AMDP = "amdp --ranks 8 --microbatches 64"


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def call(line: str) -> tuple[int, str, str]:
        code = main(line.split())
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_check_tells_the_mismatch_and_the_versions(penstock: Any) -> None:
    code, out, _ = penstock(f"check {AMDP} --option window=16")
    assert code == 0
    assert out.splitlines()[-2:] == [
        "  4 updates of 16 microbatches. At most 1 between a forward and its backward (bound 1); "
        "it meets microbatches 0 to 7 of a window.",
        "  Ops read the newest weights, of which a stage holds 1 version.",
    ]
    code, out, _ = penstock(f"check {AMDP} --option window=16 --json")
    assert json.loads(out)["checked"][0]["updates"] == {
        "window": 16, "num_updates": 4, "rule": "none", "max_mismatch": 1, "mismatch": 1,
        "mismatch_by_stage": [1] * 6 + [0, 0], "mismatched": list(range(8)), "versions": 1,
        "versions_by_stage": [1] * 8, "versions_sharded": 1, "none_predicted": None,
    }  # fmt: skip
    code, out, _ = penstock("check pipedream --ranks 3 --microbatches 8 --option window=1")
    assert out.splitlines()[-2:] == [
        "  8 updates of 1 microbatch. At most 2 between a forward and its backward (bound 2); "
        "it meets microbatch 0 of a window.",
        "  Ops read weights by pipedream (a forward the newest, its backward the same again), of which a stage "
        "holds at most 3 versions (3 2 1 by stage).",
    ]


def test_check_counted_versions_without_sharding_and_did_not_say_so(penstock: Any, tmp_path: Path) -> None:
    amdp = ps.build("amdp", 4, 32, window=8, max_mismatch=1)
    assert amdp.updates is not None
    predicting = dataclasses.replace(amdp, updates=dataclasses.replace(amdp.updates, rule="xpipe"))
    ps.save(predicting, tmp_path / "s.json")
    out = penstock(f"check {tmp_path / 's.json'}")[1]
    assert "at most 2 versions (2 2 2 2 by stage), counted without sharding; with --sharding copies, the de" in out
    sharded = max(ps.schedule.count_versions(predicting, sharding="copies").values())
    assert out.splitlines()[-1].endswith(f"in training, {sharded}.")
    assert sharded == 3
    found = json.loads(penstock(f"check {tmp_path / 's.json'} --json")[1])["checked"][0]["updates"]
    assert (found["versions"], found["versions_sharded"]) == (2, 3)
    assert "sharding" not in penstock("check xpipe --ranks 4 --microbatches 32 --option window=8")[1]


def test_check_says_where_a_rule_predicts_nothing(penstock: Any, tmp_path: Path) -> None:
    for window, said in ((2, False), (4, True)):
        ps.save(ps.build("spectrain", 4, 8, window=window), tmp_path / "s.json")
        code, out, _ = penstock(f"check {tmp_path / 's.json'}")
        assert code == 0
        assert out.splitlines()[-1].startswith("  Note: rule 'spectrain' predicts no weights here") == said


def test_every_rule_is_said_in_words() -> None:
    assert {*READS, NEWEST} == set(RULES)


def test_amdp_is_made_for_the_bound_it_is_given(penstock: Any) -> None:
    code, out, _ = penstock(f"check {AMDP} --option window=16 --option max_mismatch=0")
    assert code == 0
    assert "None between a forward and its backward (bound 0)." in out


def test_a_schedule_over_the_bound_is_refused(penstock: Any, tmp_path: Path) -> None:
    code, out, err = penstock("check pipedream --ranks 4 --microbatches 16 --option window=1 --option max_mismatch=2")
    assert (code, out) == (1, "")
    assert "meets 3 updates of stage 0" in err
    assert "at most 2 may fall there" in err
    path = tmp_path / "s.txt"
    ps.save(ps.build("pipedream", 4, 16, window=1), path)
    assert penstock(f"check {path}")[0] == 0
    code, out, _ = penstock(f"check {path} --option max_mismatch=2 --json")
    assert code == 1
    assert json.loads(out)["error"]["rule"] == "mismatch"
    assert penstock(f"simulate {path} --option max_mismatch=2")[0] == 1
    assert penstock(f"simulate {path} --option max_mismatch=3")[0] == 0


@pytest.mark.parametrize("verb", ["simulate", "show"])
def test_other_verbs_take_a_window_too(penstock: Any, verb: str) -> None:
    code, out, _ = penstock(f"{verb} amdp --ranks 2 --microbatches 4 --option window=2 --json")
    assert code == 0
    found = json.loads(out)
    assert found["num_ops"] == 2 * 4 * 2 + 2 * 2
    assert verb == "simulate" or "updates every 2 microbatches, mismatch at most 1" in found["grid"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("amdp --ranks 8 --microbatches 64 --option window=12",
            "amdp needs a window in a multiple of the 8 microbatches of a block, got 12; use 8 or 16"),
        ("amdp --ranks 8 --microbatches 64 --option window=0", "got 0; use 8"),
        ("amdp --ranks 7 --microbatches 64 --option window=14",
            "amdp needs ranks in a multiple of the 2 that each pipeline takes, got 7; use 6 or 8"),
        ("pipedream --ranks 4 --microbatches 8 --option window=0", "needs at least 1 microbatch in a window, got 0"),
        ("pipedream-2bw --ranks 4 --microbatches 8 --option window=3", "at least 4 microbatches in a window"),
        ("1f1b --ranks 4 --microbatches 8 --option window=4", "1f1b has no option 'window'; it takes no options"),
        ("amdp --ranks 4 --microbatches 8 --option max_mismatch=1", "amdp has no updates among its ops"),
        ("1f1b --ranks 4 --microbatches 8 --option max_mismatch=1", "give --option window=4 to one of"),
        ("amdp --ranks 4 --microbatches 8 --option window=4 --option max_mismatch=-1", "at least 0"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_told(penstock: Any, line: str, said: str) -> None:
    code, out, err = penstock(f"check {line}")
    assert (code, out) == (2, ""), err
    assert said in err


def test_a_window_is_not_for_files(penstock: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    ps.save(ps.build("xpipe", 2, 4, window=2), path)
    code, _, err = penstock(f"check {path} --option window=2")
    assert code == 2
    assert "--option is for library schedules" in err
