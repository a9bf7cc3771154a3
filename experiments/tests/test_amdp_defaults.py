"""What pages say of the defaults of asynchronous training is what the committed runs found."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from experiments.amdp.defaults import CASES, OPTIONS, SHARES, SYNC, over
from experiments.common import results

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_the_tutorial_says_what_was_found() -> None:
    page = (ROOT / "docs/tutorials/asynchronous.md").read_text(encoding="utf-8")
    rows = results.load(ROOT / "experiments/amdp/results", "defaults")
    names = {options: name for name, options in OPTIONS.items()}
    said = re.findall(r"^\| `(--schedule amdp[^`]*)` \| (\d+) \| (\d+) \| ([\d.]+%) \|$", page, re.MULTILINE)
    found = {(names[options], int(steps)): (int(seeds), share) for options, steps, seeds, share in said}
    ran = {(row["name"], row["steps"]) for row in rows if "amdp" in row["name"]}
    each = {key: over(rows, *key) for key in found}
    assert found == {key: (len(shares), f"{statistics.mean(shares):.1%}") for key, shares in each.items()}
    assert found.keys() == ran - {("amdp, each stage clips by 1", 200)}

    text = " ".join(page.split())
    (seeds,) = re.findall(r"seeds of `--max-mismatch 0` without `--clip` gave ([\d.]+, [\d.]+ and [\d.]+%)", text)
    assert seeds == "{:.1f}, {:.1f} and {:.1f}%".format(*(abs(100 * share) for share in each[SHARES, 400]))
    one, other = (results.find(rows, name=name, steps=200, seed=0)["loss"] for name in ("1f1b, Muon", SYNC))
    (below,) = re.findall(r"whose loss was ([\d.]+%) below that of AdamW", text)
    assert below == f"{1 - one / other:.1%}"


def test_every_case_is_one_of_the_runs() -> None:
    rows = results.load(ROOT / "experiments/amdp/results", "defaults")
    assert {(row["name"], row["steps"], row["seed"]) for row in rows} <= set(CASES)
    assert len(set(CASES)) == len(CASES)
    assert {name for name, _, _ in CASES} == set(OPTIONS)
