"""What AMDP's figure 7, table 5 and the table over mismatches find, in small; the others' tests stand beside."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from experiments.common import results

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "experiments" / "amdp"
COMMANDS = ("figure7", "rates", "table5", "tuning", "mismatch", "convergence", "defaults", "all")


@pytest.fixture
def load() -> Any:
    """Imports one of the modules."""
    return lambda name: importlib.import_module(f"experiments.amdp.{name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_its_command_and_how_long_it_takes(load: Any, name: str) -> None:
    about = load(name).__doc__
    assert f"python -m experiments.amdp.{name}" in about
    assert "minute" in about or "hour" in about
    assert f"experiments.amdp.{name}" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_all_runs_each_command_there_is(load: Any) -> None:
    module = load("all")
    commands = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert {*module.SIMULATED, *module.LEARNING} == commands - {"all"}


def test_rates_are_half_of_the_best_that_tuning_found(load: Any) -> None:
    rows, figure7, tuning = (
        results.load(FOLDER / "results", "tuning"),
        load("figure7"),
        load("tuning"),
    )
    best = {row["optimizer"]: tuning.best(rows, row)["peak"] for row in rows}
    assert {name: rate / 2 for name, rate in best.items()} == {
        "AdamW": figure7.ADAM, "SGD": figure7.SGD, "NAdam": figure7.NADAM,
    }  # fmt: skip


def small(load: Any) -> Any:
    """Two passes of three batches of eight sequences."""
    learning = load("learning")
    config = replace(learning.Task().config, context=16, width=16, num_heads=2)
    return learning.Task(config, batch=8, num_batches=6, every=3, warmup=1)


@pytest.mark.nightly
def test_figure_7(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("figure7")
    monkeypatch.setattr(load("methods"), "RATIOS", (2.1,), raising=False)
    names = ("synchronous", "amdp", "amdp, mismatch 0", "amdp, tentative", "pipedream-2bw", "vnag")
    methods = [replace(method, samples=method.samples and 8) for method in module.METHODS if method.name in names]
    rows = list(module.rows(methods, small(load), load("setups").Setup("GPT", 4, 32)))
    results.save(tmp_path, "figure7", rows)
    rows = results.load(tmp_path, "figure7")
    assert "amdp's final loss" in "\n".join(module.lines(rows))
    assert all("<svg" in str(chart(rows)) for chart in (module.by_update, module.by_time))
    by = {row["method"]: row for row in rows}
    assert [by[name]["mismatch"] for name in names[:4]] == [0, 1, 0, 1]
    assert by["vnag"]["mismatch"] > 1
    # The same sums in another grouping; with a mismatch other numbers.
    assert by["amdp, mismatch 0"]["final"] == pytest.approx(by["synchronous"]["final"], abs=2e-4)
    assert by["amdp"]["final"] != by["synchronous"]["final"]
    assert by["amdp, tentative"]["final"] not in (by["amdp"]["final"], by["synchronous"]["final"])
    assert by["amdp"]["batch_seconds"] < min(by[name]["batch_seconds"] for name in ("pipedream-2bw", "synchronous"))


def test_a_loss_is_reached_between_two_measurements(load: Any) -> None:
    reached, row = load("figure7").reached, {"curve": [(10, 3.0), (20, 2.0), (30, 1.5)]}
    assert [reached(row, loss) for loss in (3.5, 2.5, 2.0, 1.75, 1.0)] == [10, 15, 20, 25, None]


def test_a_run_that_diverges_is_told(load: Any) -> None:
    learning = load("learning")
    row = learning.train(learning.Method("wild", optimizer="SGD", peak=1e30), small(load))
    assert row["final"] is None
    assert load("learning").shown(row["final"]) == "diverged"


@pytest.mark.slow
def test_rates(load: Any) -> None:
    module, task = load("rates"), small(load)
    rows = [load("learning").train(method, task) for method in module.methods(1e-3, task)]
    assert rows[0]["window"] == 1
    assert f"{rows[1]['final'] / rows[0]['final'] - 1:+.2%}" in "\n".join(module.lines(rows))


@pytest.mark.slow
def test_table_5(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("table5")
    monkeypatch.setattr(load("methods"), "RATIOS", (2.1,), raising=False)
    times = module.throughputs(["Model-1"])
    rows = [
        {
            "model": model,
            "method": method.name,
            "updates": 100,
            "final": 2.0 + place,
            "curve": [(50, 2.9), (100, 2.0 + place / 4)],
        }
        for model in module.TASKS
        for place, method in enumerate(module.METHODS)
    ]
    text = "\n".join(module.lines(rows, times))
    assert "58.5" in text
    sync, vnag, amdp, tentative = (row["ktokens"] for row in times)
    assert sync < vnag < tentative < amdp
    assert "4.93 (+34.3%)" in text
    assert "Model-1, vNAG" in (line := list(module.curve_lines(rows[1:2]))[-1])
    assert line.split()[-3:] == ["diverged", "2.9000", "2.2500"]
    for model in module.TASKS:
        drawn = str(module.by_update(rows, model))
        assert all(part in drawn for part in (f"small {model}", *(method.name for method in module.METHODS)))


def test_the_small_models_of_table_5_stand_as_the_papers_do(load: Any) -> None:
    """Model-2 is 3.5 times as wide as Model-1 and sees twice as many tokens; a block is a stage."""
    module = load("table5")
    small = {model: task.config for model, task in module.TASKS.items()}
    for name in ("width", "context"):
        shape = {"width": "width", "context": "sequence"}[name]
        ours = getattr(small["Model-2"], name) / getattr(small["Model-1"], name)
        assert ours == getattr(module.MODELS["Model-2"], shape) / getattr(module.MODELS["Model-1"], shape)
    assert {config.depth for config in small.values()} == {module.RANKS}


@pytest.mark.nightly
def test_mismatch_finds_zb_v_as_busy_as_amdp(load: Any) -> None:
    module = load("mismatch")
    cells = module.cells(module.COSTINGS[:1], depths=(4,), per_rank=(4,))
    rows = json.loads(json.dumps([row for cell in cells for row in module.rows(cell, search=0)]))
    assert "".join(module.lines(rows))
    assert "<svg" in str(module.chart(rows, "even"))
    by = {(row["way"], row["kind"], row["dispatch"]): row for row in rows}
    assert by["zb-v", "split", "frozen"]["busy"] == pytest.approx(1)
    assert by["zb-v", "split", "frozen"]["over_memory"] < 1
    (found,) = module.by_cell(rows).values()
    assert module.reaches(found, "split")
    assert not module.reaches(found, "whole")
    assert found["mismatch 0"]["busy"] < found["mismatch 1"]["busy"]


def test_a_mismatch_buys_something_where_windows_are_as_long_as_pipelines_are_deep(load: Any) -> None:
    module = load("mismatch")
    rows = results.load(FOLDER / "results", "mismatch")
    found = {(d, n): cell for (costs, d, n), cell in module.by_cell(rows).items() if costs == "GPT"}
    assert set(found) == {(d, d * each) for d in module.DEPTHS for each in module.PER_RANK}
    short = {
        key: cell["mismatch 1"]["busy"] - max(cell[kind]["busy"] for kind in ("whole", "split"))
        for key, cell in found.items()
    }
    assert [round(100 * short[d, d], 1) for d in module.DEPTHS] == [1.6, 3.4, 1.4]
    assert all(each < 0.0015 for (d, n), each in short.items() if n > d and (d, n) != (16, 128))


def test_a_steady_share_is_that_of_a_long_run(load: Any) -> None:
    """Timed over two windows, or as what 40 more windows take."""
    module = load("mismatch")
    (cell,) = module.cells(module.COSTINGS[2:3], depths=(4,), per_rank=(2,))
    window = ps.build("1f1b", 4, 8)
    short = module.Timed(cell, "1f1b", ps.passes.repeat_windows(window, cell.num_windows(module.STEADY))).row()
    costs = cell.costs(4)
    first, then = (
        ps.simulate(ps.passes.repeat_windows(window, num), costs, links=cell.costing.links).makespan
        for num in (10, 50)
    )
    work = 8 * (sum(costs.f) + sum(costs.b))
    assert short["busy"] == pytest.approx(work * 40 / (4 * (then - first)))


def test_tuning_writes_where_it_is_told_and_shows_what_is_there(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("tuning")
    row = {"optimizer": "AdamW", "peak": 0.004, "final": 1.75, "seconds": 3.0}
    committed = (FOLDER / "results" / "tuning.json").read_bytes()
    monkeypatch.setattr(module, "rows", lambda: iter([row]))
    monkeypatch.setattr("sys.argv", ["tuning", "--out", str(tmp_path)])
    module.main()
    assert results.load(tmp_path, "tuning") == [row]
    assert results.facts(tmp_path, "tuning")["record"]["seeds"] == [module.TASK.seed]
    first = capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["tuning", "--show", "--out", str(tmp_path)])
    module.main()
    shown = capsys.readouterr().out
    assert first.endswith(shown)
    assert "1.75" in shown
    assert (FOLDER / "results" / "tuning.json").read_bytes() == committed
