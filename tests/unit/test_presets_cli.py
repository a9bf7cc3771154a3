"""Costs and links on the command line: presets and profiles wherever costs go, and what a planner refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.formats.costs import load_costs, read_costs

pytestmark = pytest.mark.unit


def told(capsys: pytest.CaptureFixture[str], words: str) -> Any:
    assert main([*words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(words.split()) == 2
    return capsys.readouterr().err


def profile(**changes: Any) -> dict[str, Any]:
    rows = {
        "f": [1.0, 4.0, 4.0, 2.0],
        "f_split": [1.0, 4.0, 4.0, 2.0],
        "i": [0.0, 4.0, 4.0, 2.0],
        "w": [1.0, 3.0, 3.0, 2.0],
        "b": [1.0, 6.0, 6.0, 4.0],
        "activation": [10.0, 40.0, 40.0, 10.0],
        "held": [0.0, 10.0, 10.0, 5.0],
        "output": [64.0, 64.0, 64.0, 0.0],
        "weight": [1.0] * 4,
        "state": [2.0] * 4,
        "update": [0.0] * 4,
    }
    return {"model": "mine", "layers": list("abcd"), "microbatch_size": 1, "num_parallel": 1, **rows, **changes}


def written(folder: Path, *profiles: dict[str, Any]) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps({"format": "penstock-profile", "version": 1, "profiles": profiles, "transfers": {}}))
    return path


def test_a_preset_is_timed_planned_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ps.cost.costs_preset("gpt2-7b", num_stages=4)
    timed = told(capsys, "simulate zb --ranks 4 --microbatches 12 --costs gpt2-7b")
    assert timed["costs"]["f"] == list(costs.f)
    assert timed["makespan"] == ps.simulate(ps.build("zb", 4, 12), costs).makespan
    planned = told(capsys, "plan --ranks 4 --microbatches 6 --costs gpt2-7b --time 3")
    assert planned["makespan"] <= ps.simulate(ps.build("zb", 4, 6), costs).makespan
    assert told(capsys, "plan --placement all --ranks 2 --microbatches 2 --costs gpt2-7b:tp=2")["makespan"] > 0


@pytest.mark.parametrize("verb", ["simulate 1f1b", "plan", "plan --placement all", "emulate 1f1b"])
def test_a_presets_speed_of_links_is_refused_where_messages_do_not_take_it(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: only tune counted `link_gb`; the other verbs took it, and their messages arrived at once."""
    line = f"{verb} --ranks 2 --microbatches 2 --costs gpt2-7b:device=a100,link_gb=0.1"
    assert "link_gb is for penstock tune" in refused(capsys, line)


def test_a_rank_works_as_long_as_in_the_papers_figure_14(capsys: pytest.CaptureFixture[str]) -> None:
    """7B, 12 microbatches: 703 ms with 57.4% bubbles, 579 with 48.8%, 398 with 25.3% are 296 to 299 ms of work."""
    busy = told(capsys, "simulate zb --ranks 4 --microbatches 12 --costs gpt2-7b")["busy"]
    assert max(busy) == pytest.approx(297.5, rel=0.02)


def test_a_profile_stands_for_costs(tmp_path: Path) -> None:
    path = written(tmp_path, profile())
    costs = load_costs(path, 2)
    assert costs == read_costs(str(path), 2)
    assert (costs.f, costs.i, costs.w, costs.b) == ((5, 6), (4, 6), (4, 5), (7, 10))
    assert (costs.activation, costs.message_bytes, costs.freed_by_input) == ((50, 50), (64, 0), 0.75)
    assert load_costs(path, 4).f == (1, 4, 4, 2)
    assert (costs.weight_bytes, costs.optimizer_bytes, costs.duration("U", 1)) == ((2, 2), (4, 4), 0.0)
    assert ps.footprint(ps.build("1f1b", 2, 4), costs).ranks[0][:5] == (2, 0, 2, 4, 100)


def test_of_several_profiles_the_fitting_one(tmp_path: Path) -> None:
    slower = profile(num_parallel=4, f_split=[2.0, 8.0, 8.0, 4.0])
    path = written(tmp_path, slower, profile(), profile(recompute=True))
    assert load_costs(path, 2).f == (5, 6)
    assert load_costs(path, 4).f == (2, 8, 8, 4)


def test_overheads_are_once_an_op(tmp_path: Path) -> None:
    path = written(tmp_path, profile(op_overhead={"f_split": 0.5, "w": 0.25}))
    assert load_costs(path, 2).f == (5.5, 6.5)
    assert load_costs(path, 2).w == (4.25, 5.25)


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ([], "expected a list with at least one profile"),
        ([profile(), profile(microbatch_size=2)], "microbatches of 1, 2 samples; profile just one size"),
        ([profile(recompute=True)], "all profiles in it recompute"),
        ([profile(held=[1.0])], "profile: held has 1 entries; give one per layer, 4 in all"),
        (
            [profile(w=[1.0, -1.0, 1.0, 1.0])],
            "profile: field 'profiles[0].w[1]': expected a list with one number of at least 0 per layer, got -1.0",
        ),
        ([profile(i="none")], "field 'profiles[0].i': expected a list"),
        ([profile(num_parallel=None)], "field 'profiles[0].num_parallel': expected a whole number of at least 1"),
    ],
)
def test_damaged_profiles(profiles: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, *profiles)
    with pytest.raises(ps.CostError) as caught:
        load_costs(path, 2)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_more_stages_than_layers(tmp_path: Path) -> None:
    with pytest.raises(ps.CostError, match="5 stages asked of a model of 4 layers"):
        load_costs(written(tmp_path, profile()), 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "simulate zb --ranks 4 --microbatches 4 --costs gpt2-8b",
            "neither a file nor a preset; did you mean gpt2-7b",
        ),
        ("plan --ranks 4 --microbatches 4 --costs gpt", "presets are gpt2-7b, gpt2-14b, gpt2-30b"),
        ("plan --ranks 4 --microbatches 4 --costs nowhere.json", "nowhere.json: No such file"),
        ("plan --placement all --ranks 4 --microbatches 4 --costs gpt2-7b:x=1", "no option 'x'"),
        ("plan --ranks 4 --microbatches 4 --costs gpt2-7b --i 3", "--costs gpt2-7b and --i both give costs"),
        ("plan --ranks 99 --microbatches 4 --costs gpt2-7b", "99 stages: it has 24 layers"),
        (
            "plan --ranks 2 --microbatches 2 --link 0:1=loss:3%",
            "0:1=latency:20ms, but the links have 0:1=loss:3%",
        ),
        (
            "plan --placement all --ranks 2 --microbatches 2 --link 0:1=latency:1ms+loss:1%",
            "simulate the result under the real conditions",
        ),
        ("plan --ranks 2 --microbatches 2 --link 0:1=latency:steps:0ms/1ms,5ms/2ms", "delays that do not change"),
        (
            "plan --placement all --ranks 2 --microbatches 2 --cost message_bytes=1e6 --link 0:1=bandwidth:1GB/s",
            "simulate the result under the real conditions",
        ),
        ("simulate 1f1b mllm --ranks 4 --microbatches 12 --costs gpt2-7b", "one entry per stage"),
        ("plan --ranks 2 --microbatches 2 --link 0:1=latency:-3ms", "-3ms"),
    ],
)
def test_refusals(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, words)


def test_a_planner_takes_latency_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    common = "plan --ranks 4 --microbatches 12 --f 10 --i 10 --w 10"
    assert told(capsys, f"{common} --link 0:1=latency:20ms")["makespan"] == 410
    assert told(capsys, f"{common} --link 0:1=20")["makespan"] == 410
    assert told(capsys, "plan --placement all --ranks 2 --microbatches 2 --link 0:1=latency:3ms")["makespan"] > 0
