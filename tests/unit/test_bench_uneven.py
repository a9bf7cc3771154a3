"""The benchmark of orders of microbatches: its README has the figures of its results, which can be measured again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from statistics import fmean
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
def cases() -> Any:
    return json.loads((FOLDER / "results.json").read_text())["cases"]


def test_every_case_of_the_protocol_was_run(bench: ModuleType, cases: Any) -> None:
    wanted = {
        (*of, sigma, seed) for of in bench.SCHEDULES for sigma in bench.SIGMAS for seed in range(bench.NUM_DRAWS)
    }
    assert [tuple(case[:4]) for case in cases] == sorted(wanted, key=[tuple(case[:4]) for case in cases].index)
    assert len(cases) == len(wanted)


def test_the_readme_has_the_figures_of_the_results(bench: ModuleType) -> None:
    assert bench.tables() in (FOLDER / "README.md").read_text()


def test_what_is_promised_held(bench: ModuleType, cases: Any) -> None:
    """No order is slower than arrival where its costs are known, and in the mean none where they are 5% off."""
    for case in cases:
        ways = dict(zip(bench.WAYS, case[4:], strict=False))
        assert all(ways[way] <= ways["arrival"] for way in bench.WAYS)
        assert ways["moves"] <= ways["rules"]
        assert ways["size: moves"] <= ways["size: rules"]
    for name, num_ranks in bench.SCHEDULES:
        for sigma in bench.SIGMAS:
            assert fmean(case[-1] for case in cases if case[:3] == [name, num_ranks, sigma]) <= 1.0


def test_a_case_is_measured_again_alike(bench: ModuleType, cases: Any) -> None:
    told = next(case for case in cases if case[:4] == ["zb-h1", 8, 0.6, 3])
    schedule = ps.build("zb-h1", 8, 32)
    factors = bench.drawn(0.6, 32, 3)
    ways = dict(zip(bench.WAYS, told[4:], strict=False))
    planned = ps.planning.order_microbatches(schedule, ps.Costs([10] * 8, [10] * 8, [10] * 8, uneven=factors))
    assert round(planned.makespan / (30 * sum(factors)), 4) == ways["rules"]
    assert round(planned.arrival / (30 * sum(factors)), 4) == ways["arrival"]
