"""AMDP's tables 3 and 4 as experiments: a small sample of each."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from experiments.common import results

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "experiments" / "amdp"


@pytest.fixture
def load() -> Any:
    """Imports one of the modules."""
    return lambda name: importlib.import_module(f"experiments.amdp.{name}")


@pytest.mark.parametrize("name", ["table3", "table4"])
def test_each_says_its_commands_and_how_long_they_take_and_the_readme_has_them(load: Any, name: str) -> None:
    about = load(name).__doc__
    assert f"python -m experiments.amdp.{name} --measured" in about
    assert "minute" in about
    assert f"experiments.amdp.{name}" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["table3", "table4"])
def test_the_raw_results_make_the_table(load: Any, name: str) -> None:
    rows = results.load(FOLDER / "results", name)
    lines = list(load(name).lines(rows))
    for model in load("setups").MODELS:
        assert any(line.startswith(model) for line in lines)
    assert any("paper" in line for line in lines)
    assert any("simulated" in line for line in lines)


def test_table_3_simulated_anew_is_that_of_the_raw_results(load: Any) -> None:
    """The row with the shortest steps, but for the orders that are searched."""
    methods, setups = load("methods"), load("setups")
    rows = results.load(FOLDER / "results", "table3")
    keys_of, setup = load("table3").keys_of, setups.Setup("GPT", 4, 16)
    for method in ("1f1b", "interleaved-1f1b", "chimera", "zb-v", "pipedream", "xpipe", "pipedream-2bw"):
        trial = methods.trial_of(method, setup)
        found = trial.ktokens(methods.simulate(trial))
        assert found == pytest.approx(results.find(rows, **keys_of(setup, method))["simulated"], rel=1e-4)


def test_steady_throughput_leaves_out_filling_and_draining(load: Any) -> None:
    """Stages of 1 + 2 ms, updates at once: amid many windows a microbatch every 3 ms."""
    methods = load("methods")
    schedule = ps.build("pipedream-2bw", 4, 64, window=8)
    costs = ps.Costs.uniform(4, 1.0, 1.0, 1.0)
    trial = methods.Trial("pipedream-2bw", schedule, costs, ps.Links(), 8, 3000)
    timeline = methods.simulate(trial)
    assert trial.ktokens(timeline) == pytest.approx(1000)
    assert 64 * 3000 / timeline.makespan < 970


def test_a_drained_step_counts_whole(load: Any) -> None:
    methods = load("methods")
    schedule = ps.schedule.with_updates(ps.build("1f1b", 4, 8), 8)
    trial = methods.Trial("1f1b", schedule, ps.Costs.uniform(4, 1.0, 1.0, 1.0), ps.Links(), 8, 3000)
    assert trial.ktokens(methods.simulate(trial)) == pytest.approx(8 * 3000 / (8 * 3 + 3 * 3))


def test_xpipe_predicts_once_for_each_weight_and_distance(load: Any) -> None:
    """By hand, rank i of 3, windows of 3: the first 2 - i forwards of a window are ahead of its update by one."""
    schedule = ps.build("xpipe", 3, 9, window=3)
    assert load("methods").predictions(schedule) == [2, 2, 0]


def test_a_heavier_head_is_on_the_last_stage_alone(load: Any) -> None:
    setups = load("setups")
    one, two = (setups.Setup("GPT", 4, 16, head=head).costs() for head in (1.0, 2.0))
    head = setups.Setup("GPT", 4, 16).preset.shape.layers()[-1]
    more = setups.Setup("GPT", 4, 16).preset.device.compute_ms("F", head.f)
    assert one.f[:3] == two.f[:3]
    assert one.b[:3] == two.b[:3]
    assert two.f[3] - one.f[3] == pytest.approx(more)
    assert two.b[3] - one.b[3] == pytest.approx(2 * more)


def test_without_zero_every_copy_steps(load: Any) -> None:
    setup = load("setups").Setup("BERT", 8, 32)
    on, off = (setup.costs(copies=4, zero=zero) for zero in (True, False))
    assert all(a < b for a, b in zip(on.take_over, off.take_over, strict=True))
    assert off.take_over[1] == pytest.approx(setup.move_ms(62 * off.weight_bytes[1] / 2))
    assert on.duration("U", 1) == off.duration("U", 1) > off.take_over[1], "the owner also adds up"


def test_tentative_updates_cost_less_than_draining_does_in_short_windows(load: Any) -> None:
    timing, learning = load("timing"), load("learning")
    setup = load("setups").Setup("GPT", 4, 16)
    methods = {
        "none": learning.Method("none", "amdp"),
        "tentative": learning.Method("tentative", "amdp", rule="tentative"),
        "drained": learning.Method("drained", "amdp", options={"max_mismatch": 0}),
    }
    seconds = {name: timing.batch_seconds(method, setup) for name, method in methods.items()}
    assert seconds["none"] < seconds["tentative"] < 0.9 * seconds["drained"]


def test_a_head_takes_as_long_as_so_many_layers(load: Any) -> None:
    pays = load("pays")
    none, one, three = (pays.setup_of(4, 1, head, 200.0).costs() for head in (0, 1, 3))
    layer = none.f[0] / 12 + none.b[0] / 12
    assert one.f[3] + one.b[3] - none.f[3] - none.b[3] == pytest.approx(layer, rel=1e-4)
    assert three.f[3] + three.b[3] - none.f[3] - none.b[3] == pytest.approx(3 * layer, rel=1e-4)


def test_the_raw_results_of_pays_make_its_table(load: Any) -> None:
    rows = results.load(FOLDER / "results", "pays")
    lines = list(load("pays").lines(rows))
    assert len([line for line in lines if line[0:1].isdigit()]) == len(rows)
    for row in rows:
        assert 0 <= row["known"] <= 1
        assert row["tentative"] <= 1.001 * row["none"], "a tentative update takes time and gains none"
        assert row["order_gb"] <= row["gb"]


@pytest.mark.nightly
def test_measured_on_emulated_devices(load: Any) -> None:
    methods, measured = load("methods"), load("measured")
    schedule = ps.build("pipedream-2bw", 2, 16, window=2)
    costs = ps.Costs.uniform(2, 1.0, 1.0, 1.0)
    trial = methods.Trial("pipedream-2bw", schedule, costs, ps.Links(), 2, 3000)
    (row,) = measured.measure_all([trial], jobs=1)
    assert row["measured_ms"][0] >= 48
    assert json.loads(json.dumps(row)) == row
