"""`penstock simulate` with several schedules: the same costs for all, then side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main

pytestmark = pytest.mark.unit

COUNTS = "--ranks 4 --microbatches 12"


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> tuple[int, str, str]:
        code = main(["simulate", *line.split()])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_each_row_is_what_the_simulator_says_of_that_schedule(simulate: Any) -> None:
    line = f"1f1b zb-v {COUNTS} --costs gpt2-7b --link 1:2=20 --link default=1 --dispatch hinted --json"
    code, out, err = simulate(line)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["links"]["delays"], found["dispatch"]) == ({"1:2": 20.0}, "hinted")
    for row in found["schedules"]:
        schedule = ps.build(row["name"], 4, 12)
        costs, links = ps.cost.costs_preset("gpt2-7b", schedule.num_stages), ps.Links({(1, 2): 20.0}, default=1.0)
        timeline = ps.simulate(schedule, costs, links, dispatch="hinted")
        assert row["makespan"] == timeline.makespan
        assert row["bubble_ratio"] == timeline.bubble_ratio
        assert row["peak_activations"] == max(timeline.peak_activations)
        assert row["peak_bytes"] == ps.footprint(schedule, costs, links, dispatch="hinted").peak
    first, second = found["schedules"]
    assert first["speedup"] == 1
    assert second["speedup"] == first["makespan"] / second["makespan"]


def test_a_file_stands_beside_names_and_gives_ranks_and_microbatches(simulate: Any) -> None:
    ps.build("zb-h1", 4, 6).save("mine.json")
    code, out, _ = simulate("zb-h1 mine.json gpipe --costs gpt2-7b --json")
    assert code == 0
    same, mine, other = json.loads(out)["schedules"]
    assert mine == same | {"name": "mine"}
    assert (other["num_ranks"], other["num_microbatches"]) == (4, 6)
    assert other["makespan"] != mine["makespan"]


def test_who_fits(simulate: Any) -> None:
    line = f"1f1b gpipe zb-h1 zb-v {COUNTS} --costs gpt2-7b"
    rows = json.loads(simulate(f"{line} --memory-limit 35GiB --json")[1])["schedules"]
    assert [row["fits"] for row in rows] == [True, False, True, False]
    assert all(row["fits"] == (row["peak_bytes"] <= 35 * 2**30) for row in rows)
    assert "fits" in simulate(f"{line} --memory-limit 35GiB")[1].splitlines()[0]
    assert all(row["fits"] is None for row in json.loads(simulate(f"{line} --json")[1])["schedules"])
    activations = json.loads(simulate(f"1f1b gpipe {COUNTS} --memory-limit 5 --json")[1])["schedules"]
    assert [row["fits"] for row in activations] == [True, False]


@pytest.mark.parametrize(
    ("more", "fits"),
    [
        ("--f 10 --i 10 --w 10 --link 0:1=60 --dispatch hinted --memory-limit 6", True),
        ("--f 10 --i 10 --w 10 --link 0:1=60 --dispatch hinted --memory-limit 1.5", False),
        ("--f 10 --i 10 --w 10 --messages gloo --memory-limit 1.5", False),
        ("--costs own.json --messages gloo --memory-limit 130B", True),
        ("--costs own.json --messages gloo --memory-limit 120B", False),
    ],
)
def test_a_row_is_that_of_the_schedule_alone(simulate: Any, more: str, fits: bool) -> None:
    """Regression: a limit did not cap ranks that choose their ops, and buffers of receives did not count."""
    rows = {"f": 10, "i": 10, "w": 10, "activation": 1, "message_bytes": 20, "weight_bytes": 2}
    Path("own.json").write_text(json.dumps(rows))
    row, _ = json.loads(simulate(f"1f1b zb-h1 --ranks 2 --microbatches 6 {more} --json")[1])["schedules"]
    code, out, _ = simulate(f"1f1b --ranks 2 --microbatches 6 {more} --json")
    assert row["fits"] == (code == 0) == fits
    if fits:
        assert row["makespan"] == json.loads(out)["makespan"]
    else:
        assert json.loads(out)["error"]["rule"] == "memory"


def test_options_are_those_that_a_schedule_takes(simulate: Any) -> None:
    line = "1f1b zb amdp --ranks 4 --microbatches 16 --warmup 7,5,3,1 --option window=8 --option max_mismatch=1"
    code, out, err = simulate(line)
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()[2:6]
    assert head.split()[-2:] == ["mismatch", "versions"]
    assert [row.split()[0] for row in rows] == ["1f1b", "zb", "amdp"]
    assert [row.split()[-2] for row in rows] == ["0", "0", "1"]
    assert max(map(len, (head, *rows))) <= 80


def test_a_long_name_leaves_the_table_within_a_terminal(simulate: Any) -> None:
    name = "a-schedule-that-has-a-very-long-name-indeed"
    ps.build("zb-h1", 4, 6).save(f"{name}.json")
    out = simulate(f"zb-h1 {name}.json --costs gpt2-7b --memory-limit 35GiB")[1]
    rows = out.splitlines()[:3]
    assert rows[2].startswith("a-schedule…ng-indeed"[:10])
    assert max(map(len, rows)) <= 80


def test_ops_that_the_costs_do_not_name_are_told(simulate: Any) -> None:
    ps.build("distmm", 4, 8).save("towers.json")
    said = simulate("towers.json towers.json --f 1 --i 1 --w 1")[1]
    assert "note  of towers, GATHER takes 0 ms; give the time, as --cost GATHER=2.5" in said


def test_the_dispatch_that_auto_chose_is_told_of_each(simulate: Any) -> None:
    """Both the table and the JSON said "auto" alone, though a single schedule names what was chosen."""
    line = f"{COUNTS} --f 10 --i 10 --w 10 --link 0:1=20 --dispatch auto"
    alone = [json.loads(simulate(f"{name} {line} --json")[1])["dispatch"] for name in ("1f1b", "zb-h1")]
    told = json.loads(simulate(f"1f1b zb-h1 {line} --json")[1])
    assert told["dispatch"] == "auto"
    assert [row["dispatch"] for row in told["schedules"]] == alone
    said = simulate(f"1f1b zb-h1 {line}")[1]
    assert all(f"note  {name} runs {each}, the fastest" in said for name, each in zip(("1f1b", "zb-h1"), alone))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (f"1f1b zb-v {COUNTS} --f 10 --i 10 --w 10", "models would differ"),
        (f"1f1b zb-h1 {COUNTS} --timeline x.svg", "--timeline is for one schedule"),
        (f"1f1b zb-h1 {COUNTS} --warmup 4,3,2,1", "--option warmup: none of 1f1b, zb-h1 takes it"),
        (f"1f1b zb-h1 {COUNTS} --memory-limit 35GiB", "do not say what weights take"),
        (f"1f1b two.json {COUNTS}", "two.json is for 2 ranks and 1f1b for 4"),
        (f"1f1b gpipe {COUNTS} --f 0 --i 0 --w 0", "1f1b takes 0 ms, and so no speeds compare"),
        ("two.json two.json --ranks 9", "--ranks is for library schedules"),
        ("two.json two.json --microbatches 99", "--microbatches is for library schedules"),
        ("two.json two.json --option max_mismatch=1", "two.json has no updates among its ops"),
        (f"1f1b nope {COUNTS}", "no schedule named 'nope'"),
    ],
)
def test_mistakes(simulate: Any, line: str, word: str) -> None:
    ps.build("1f1b", 2, 4).save("two.json")
    code, out, err = simulate(line)
    assert (code, out) == (2, "")
    assert word in err


def test_compare_says_where_its_work_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1f1b", "zb-v"]) == 2
    assert "penstock compare is gone since 0.2; give penstock simulate several" in capsys.readouterr().err
