"""The benchmark of the late link: the README has the figures, and the aims were met."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "benchmarks" / "late_link"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_late_link", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plans() -> Any:
    return json.loads((FOLDER / "plans.json").read_text())


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads((FOLDER / "results.json").read_text())


def test_the_readme_has_the_figures_of_the_results(bench: ModuleType, plans: Any, results: Any) -> None:
    assert bench.table(plans, results) in (FOLDER / "README.md").read_text()


def test_the_aims_were_met(bench: ModuleType, plans: Any, results: Any) -> None:
    measured = bench.medians(results, bench.WARMUP)
    assert measured["hinted"] <= 1.06 * measured["undelayed"]
    assert measured["replanned"] <= 1.06 * measured["undelayed"]
    for case, bound in (("12", 1.117), ("10", 1.175), ("8", 1.349)):
        found = plans["cases"][case]
        assert found["lower_bound"] == pytest.approx(1030 * bound, rel=1e-3)
        assert bench.medians(results, case)["replanned"] <= 1.02 * found["lower_bound"]
    halved, freed = plans["cases"][bench.HALVED], plans["cases"][bench.OFFLOADED]
    measured = bench.medians(results, bench.HALVED)
    assert halved["makespan"] == halved["lower_bound"] == 1090
    assert measured["replanned"] <= 1.06 * measured["undelayed"]
    assert freed["makespan"] == freed["lower_bound"] == 1150 > 1.06 * 1030


def test_the_readme_has_what_the_end_of_a_step_costs() -> None:
    spec = importlib.util.spec_from_file_location("bench_step_end", FOLDER / "step_end.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cells = json.loads((FOLDER / "step_end.json").read_text())["cells"]
    assert module.tables(cells) in (FOLDER / "README.md").read_text()
    assert {(each["ranks"], each["late_ms"]) for each in cells} == {(n, ms) for n in (2, 4, 8) for ms in (0, 20, 60)}
    for each in cells:
        ring, direct = (each["sum"][way] for way in (module.RING, module.DIRECT))
        assert each["late_ms"] == 0 or ring > 1.5 * direct
