"""What pages say of the defaults of asynchronous training is what the committed runs found."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.amdp.defaults import CASES, OPTIONS
from experiments.common import results

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_every_case_is_one_of_the_runs() -> None:
    rows = results.load(ROOT / "experiments/amdp/results", "defaults")
    assert {(row["name"], row["steps"], row["seed"]) for row in rows} <= set(CASES)
    assert len(set(CASES)) == len(CASES)
    assert {name for name, _, _ in CASES} == set(OPTIONS)
