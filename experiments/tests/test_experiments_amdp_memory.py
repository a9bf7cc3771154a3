"""AMDP's table 1 and figures 6 and 8 as experiments: a small sample of each."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.common import results

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "experiments" / "amdp"
COMMANDS = ("table1", "figure6", "figure8")


@pytest.fixture
def load() -> Any:
    """Imports one of the modules."""
    return lambda name: importlib.import_module(f"experiments.amdp.{name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_its_command_and_the_readme_has_it(load: Any, name: str) -> None:
    assert f"python -m experiments.amdp.{name}" in load(name).__doc__
    assert f"experiments.amdp.{name}" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_table_1(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("table1")
    monkeypatch.setattr(module, "LONG", 96)
    rows = json.loads(json.dumps(list(module.rows([(4, 8)]))))
    assert "".join(module.lines(rows))
    by = {row["method"]: row for row in rows}
    for name in ("1f1b", "interleaved-1f1b", "zb-v"):
        assert by[name]["bubble"] == pytest.approx(by[name].get("right_bubble", by[name]["paper_bubble"]))
    for name, row in by.items():
        weights = row.get("right_weights", row["paper_weights"])
        assert weights is None or weights != weights or row["weights"] == weights, name
        if name != "amdp":  # the forwards that it reads ahead are no part of the formula
            assert row["activations"] == row.get("right_activations", row["paper_activations"]), name
    assert 4 < by["amdp"]["activations"] <= 6
    assert [by[name]["mismatch"] for name in ("1f1b", "pipedream", "pipedream-2bw", "amdp")] == [0, 3, 1, 1]
    assert [by[name]["versions"] for name in ("1f1b", "pipedream", "pipedream-2bw", "amdp")] == [1, 4, 2, 1]


@pytest.mark.nightly
def test_figures_6_and_8(load: Any) -> None:
    """One setup: what the paper says in numbers holds, and the chart and the table come out of the rows."""
    memory = load("memory")
    setup = memory.Setup("GPT", 4, 64)
    held = {method: memory.held(memory.trial_of(method, setup)) for method in ("1f1b", "interleaved-1f1b")}
    activation = setup.costs().activation[1]
    more = (held["interleaved-1f1b"].peak - held["1f1b"].peak) / activation
    assert more == pytest.approx(1.5, rel=0.01)
    orders = memory.amdp_trials(setup)
    for trial in orders.values():
        on, off = memory.held(trial), memory.held(trial, zero=False)
        assert on.peak <= setup.preset.device.memory
        copies = sum(trial.costs.weight_bytes) / 2
        assert sum(off.totals) - sum(on.totals) == pytest.approx(copies * memory.STEPPED_BYTES)
    assert memory.held(orders["amdp"]).peak <= memory.held(orders["amdp, fastest"]).peak


def test_what_was_found_is_shown(load: Any) -> None:
    rows = results.load(FOLDER / "results", "figure6")
    six, eight = load("figure6"), load("figure8")
    assert "".join(six.lines(rows))
    assert "<svg" in str(six.chart(rows, "GPT", 8))
    assert "".join(eight.lines(rows))
    assert "<svg" in str(eight.chart(rows))
    for (model, d), paper in eight.PAPER.items():
        assert eight.rise(rows, model, d, "amdp") == pytest.approx(paper, rel=0.2)
