"""What pages say of the defaults of asynchronous training is what the committed runs found."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from experiments.amdp.defaults import AMDP, CASES, OPTIONS, SYNC, over
from experiments.common import results

pytestmark = [pytest.mark.unit, pytest.mark.results]

ROOT = Path(__file__).parents[2]


def shares(name: str, steps: int) -> str:
    """As pages have it."""
    return f"{statistics.mean(over(results.load(ROOT / 'experiments/amdp/results', 'defaults'), name, steps)):.1%}"


def test_the_tutorial_says_what_was_found() -> None:
    text = " ".join((ROOT / "docs/tutorials/asynchronous.md").read_text(encoding="utf-8").split())
    (found,) = re.findall(r"in the mean ([\d.]+%) above .1f1b. after 400 steps", text)
    assert found == shares(AMDP, 400)
    (found,) = re.findall(r"with a mismatch of one it was ([\d.]+%)", text)
    assert found == shares("amdp, mismatch 1", 400)
    (found,) = re.findall(r"with the windows of 2d [^.]* ([\d.]+%) after 200", text)
    assert found == shares(tuple(OPTIONS)[6], 200)
    (muon, adamw) = re.findall(r"Muon lost ([\d.]+%) .* AdamW lost ([\d.]+%)", text)[0]
    assert muon == shares("amdp, mismatch 1, Muon", 200)
    assert adamw == shares(tuple(OPTIONS)[4], 200)
    rows = results.load(ROOT / "experiments/amdp/results", "defaults")
    one, other = (results.find(rows, name=name, steps=200, seed=0)["loss"] for name in ("1f1b, Muon", SYNC))
    (below,) = re.findall(r"synchronous loss was ([\d.]+%) below AdamW's", text)
    assert below == f"{1 - one / other:.1%}"


def test_every_case_is_one_of_the_runs() -> None:
    rows = results.load(ROOT / "experiments/amdp/results", "defaults")
    assert {(row["name"], row["steps"], row["seed"]) for row in rows} <= set(CASES)
    assert len(set(CASES)) == len(CASES)
    assert {name for name, _, _ in CASES} == set(OPTIONS)
