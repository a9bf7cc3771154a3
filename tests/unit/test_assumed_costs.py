"""What is assumed where no costs are given: the same for every schedule of one model, and said in the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.draw import save_picture, to_svg
from penstock.library import ASYNCHRONOUS

pytestmark = pytest.mark.unit

SYNCHRONOUS = [name for name in ps.library.SCHEDULES if name not in ASYNCHRONOUS]
ASSUMED = "F = I = W = 0.5 ms per stage, 1 ms for each rank's share of the model; give --f, --i, --w or --costs"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    return json.loads(run(capsys, *words, "--json"))


@pytest.mark.parametrize("name", ps.library.SCHEDULES)
def test_every_schedule_is_timed_over_the_same_model(name: str) -> None:
    # 4 ranks, 8 microbatches: F, I and W of a rank's share of the model take 1 ms each, however it is cut.
    assert ps.simulate(ps.build(name, 4, 8)).busy == pytest.approx([24.0] * 4)


def test_better_schedules_do_not_look_slower_without_costs() -> None:
    took = {name: ps.simulate(ps.build(name, 4, 8)).makespan for name in SYNCHRONOUS}
    assert (took["1f1b"], took["interleaved-1f1b"], took["zb-v"]) == (33.0, 28.5, 25.5)
    assert (took["chimera"], took["dualpipe"]) == (30.0, 25.0)
    assert max(took, key=lambda name: took[name]) in ("gpipe", "1f1b")


@pytest.mark.parametrize(("ranks", "stages"), [(4, 12), (3, 9), (5, 15), (3, 7)])
def test_stages_of_a_third_keep_their_order(ranks: int, stages: int) -> None:
    # Sums of shares are exact, so what is ready at one moment is: rounding does not choose among ops.
    placement = ps.placements.circular(ranks, stages)
    units = ps.Costs.uniform(stages)
    for rules in (ps.Rules(), ps.Rules(kinds="backward-first", forward=ps.breadth_first(interval=ranks))):
        assumed, unit = (
            ps.Program(placement, 8, rules, split=True, costs=costs).build().order for costs in (None, units)
        )
        assert assumed == unit


def test_a_program_is_listed_over_what_it_is_simulated_with() -> None:
    *_, last = ps.program.Stepper(
        program := ps.Program(ps.placements.v_shape(4), 8, ps.Rules(max_in_flight=8), split=True)
    )
    assert last.time <= ps.simulate(program.build()).makespan <= last.time + 0.5


def test_simulate_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ("--ranks", "4", "--microbatches", "8")
    for name, makespan, assumed in [("1f1b", 33.0, ASSUMED.replace("0.5", "1")), ("zb-v", 25.5, ASSUMED)]:
        told = found(capsys, "simulate", name, *counts)
        assert (told["makespan"], told["assumed"]) == (makespan, assumed)
    assert f"assumed       {ASSUMED}" in run(capsys, "simulate", "zb-v", *counts)
    assert found(capsys, "simulate", "1f1b", *counts, "--f", "1", "--i", "1", "--w", "1")["assumed"] is None
    assert found(capsys, "simulate", "1f1b", *counts, "--costs", "gpt2-14b")["assumed"] is None
    assert found(capsys, "simulate", "1f1b", *counts, "--f", "10", "--cost", "b=20")["assumed"] == (
        "I = W = half of B; give --i, --w or --costs"
    )


def test_simulate_names_the_kinds_that_no_costs_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words, file = ("simulate", "distmm", "--ranks", "4", "--microbatches", "8"), tmp_path / "costs.json"
    assert found(capsys, *words)["untimed"] == ["GATHER"]
    said = "GATHER takes 0 ms; give the time, as --cost GATHER=2.5"
    assert f"untimed       {said}\n" in run(capsys, *words)
    file.write_text('{"f": 1, "i": 1, "w": 1, "other": {"GATHER": 2.5}}', encoding="utf-8")
    assert found(capsys, *words, "--costs", str(file))["untimed"] == []
    assert "untimed" not in run(capsys, *words, "--costs", str(file))
    alike = [(*words, "--costs", str(file)), (*words, "--f", "1", "--i", "1", "--w", "1", "--cost", "GATHER=2.5")]
    by_file, typed = (found(capsys, *each) for each in alike)
    assert (typed["untimed"], typed["makespan"]) == ([], by_file["makespan"])
    assert found(capsys, *words, "--costs", "gpt2-7b", "--cost", "GATHER=2.5")["untimed"] == [], "beside a preset"
    num_stages = ps.build("distmm", 4, 8).num_stages
    times = [*words, "--cost", f"GATHER={json.dumps([2.5] * num_stages)}", "--f=1", "--i=1", "--w=1"]
    assert found(capsys, *times)["makespan"] == by_file["makespan"], "one time for each stage"
    file.write_text('{"f": 1, "i": 1, "w": 1, "other": {"GATHER": 0}}', encoding="utf-8")
    assert found(capsys, *words, "--costs", str(file))["untimed"] == []
    amdp = ("simulate", "amdp", "--ranks", "4", "--microbatches", "16")
    assert found(capsys, *amdp)["untimed"] == []
    assert found(capsys, *amdp, "--option", "window=8")["untimed"] == ["U"]
    assert found(capsys, *amdp, "--option", "window=8", "--costs", "amdp-gpt")["untimed"] == []


def test_a_bandwidth_without_bytes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages have 0 bytes unless costs say otherwise, and then a bandwidth did nothing without a word."""
    words = ("--ranks", "2", "--microbatches", "4", "--f=10", "--i=10", "--w=10")
    slow, said = ("--link", "0:1=bandwidth:1MB/s"), "messages have 0 bytes; give --cost message_bytes=2e6"
    verbs = [("simulate", "1f1b"), ("simulate", "1f1b", "gpipe"), ("plan", "--time=0.2")]
    for verb in verbs:
        told = found(capsys, *verb, *words, *slow)
        for row in told.get("schedules", [told]):
            assert row["unsized"] == ["0:1"]
        assert said in run(capsys, *verb, *words, *slow)
        assert said not in run(capsys, *verb, *words, *slow, "--cost", "message_bytes=2e6")
        assert said not in run(capsys, *verb, *words, "--link", "0:1=20")


def test_memory_of_schedules_with_more_stages_compares(capsys: pytest.CaptureFixture[str]) -> None:
    # ZB-V holds as much as 1F1B's first rank, in twice as many activations of stages half as large.
    for name, held in [("1f1b", "4                1.00"), ("zb-v", "8                1.00")]:
        text = run(capsys, "simulate", name, "--ranks", "4", "--microbatches", "8")
        (row,) = [line for line in text.splitlines() if line.startswith("rank 0  ")]
        assert row.split()[-2:] == held.split()


def test_plan_and_search_assume_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ("--ranks", "4", "--microbatches", "8")
    planned = found(capsys, "plan", *counts, "--placement", "v-shape", "--time", "0.2")
    assert planned["assumed"] == ASSUMED
    assert 24.0 < planned["makespan"] <= 25.5
    searched = found(capsys, "plan", *counts, "--placement", "all")
    assert searched["assumed"] == ASSUMED.replace("0.5 ms per stage", "0.25 ms per part")
    assert {each["placement"]: each["makespan"] for each in searched["found"]}["one-to-one"] == 27.0
    assert 24.0 <= searched["makespan"] <= 27.0


def test_a_drawn_schedule_says_what_it_is_drawn_with(tmp_path: Path) -> None:
    assert "F = I = W = 0.5 per stage" in to_svg(ps.build("zb-v", 4, 8))
    assert "makespan 25.5" in to_svg(ps.build("zb-v", 4, 8))
    assert "F = I = W = 1, U = 0.5" in to_svg(ps.build("amdp", 4, 8, window=4))
    gathers = to_svg(ps.build("distmm", 4, 8))  # ops of own kinds took no time, so no picture showed them
    assert "F = I = W = 1, GATHER = 0.5" in gathers
    assert "<title>1GATHER0: rank 1, 5 to 5.5</title>" in gathers
    save_picture(ps.build("zb-v", 4, 8), tmp_path / "page.html")
    assert "F = I = W = 0.5 per stage" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_a_plan_is_drawn_over_its_own_costs_and_links(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"plan{ending}"
    costs = ("--f", "10", "--i", "10", "--w", "10", "--link", "0:1=20")
    told = found(capsys, "plan", "--ranks", "4", "--microbatches", "8", *costs, "--time", "0.2", "--out", str(file))
    planned = ps.plan(ps.Costs.uniform(4, 10, 10, 10), 4, 8, ps.Links({(0, 1): 20.0}), time_limit=0.2)
    assert planned.timeline.makespan == planned.makespan == told["makespan"]
    text = file.read_text(encoding="utf-8")
    assert f"{told['makespan']:.0f} ms" in text
    assert "unit times" not in text
    found(capsys, "plan", "--placement", "all", "--ranks", "2", "--microbatches", "4", *costs, "--out", str(file))
    if ending == ".svg":
        assert "time, ms" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", [".json", ".txt", ".csv"])
def test_a_plan_is_written_as_a_schedule(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"plan{ending}"
    run(capsys, "plan", "--ranks", "2", "--microbatches", "4", "--time", "0.2", "--out", str(file))
    ps.check(ps.load(file))
