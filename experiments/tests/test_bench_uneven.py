"""The benchmark of orders of microbatches: its README has the figures of its results, which can be measured again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock as ps

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "benchmarks" / "uneven"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_uneven", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads((FOLDER / "results.json").read_text())


def test_every_case_of_the_protocol_was_run(bench: ModuleType, results: Any) -> None:
    wanted = [(*of, sigma) for of in bench.SCHEDULES for sigma in bench.SIGMAS]
    assert [tuple(row[:3]) for row in results["rows"]] == wanted
    assert results["num_draws"] == bench.NUM_DRAWS


def test_the_readme_has_the_figures_of_the_results(bench: ModuleType) -> None:
    assert bench.tables() in (FOLDER / "README.md").read_text()


def test_what_is_promised_held(results: Any) -> None:
    """No order is slower than arrival where its costs are known, and in the mean none where they are 5% off."""
    assert results["slower_than_arrival"] == 0
    errors = results["columns"].index("with errors: mean")
    assert all(row[errors] <= 1.0 for row in results["rows"])


def test_a_case_is_measured_again_alike(bench: ModuleType, results: Any) -> None:
    told = results["sample"]
    schedule = ps.build("zb-h1", 8, 32)
    factors = bench.drawn(0.6, 32, 3)
    ways = dict(zip(bench.WAYS, told[4:], strict=False))
    planned = ps.planning.order_microbatches(schedule, ps.Costs([10] * 8, [10] * 8, [10] * 8, uneven=factors))
    assert round(planned.makespan / (30 * sum(factors)), 4) == ways["rules"]
    assert round(planned.arrival / (30 * sum(factors)), 4) == ways["arrival"]
