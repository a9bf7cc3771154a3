"""Every case of the table with one process a rank; all in one launch for each number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import penstock as ps
from processes import run_ranks
from runtime_cases import CASES, compare
from tiers import in_turn

pytestmark = pytest.mark.multiproc

RUNS = {
    2: [("zb-v", "frozen", True), ("1f1b", "dynamic", False), ("interleaved-1f1b", "dynamic", False)],
    4: [("1f1b", "frozen", False), ("zb-v", "dynamic", True)],
}


def run_cases(rank: int, ranks: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    found = {}
    for number, name in enumerate(CASES):
        for schedule, dispatch, defer in in_turn(RUNS[ranks], number):
            found[f"{name}, {schedule}, {dispatch}"] = compare(name, ps.build(schedule, ranks, 4), dispatch, defer)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_as_the_plain_loop(ranks: int) -> None:
    outcomes = run_ranks(ranks, run_cases, ranks)
    wrong: list[Any] = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    for outcome in outcomes:
        for name, found in (outcome.value or {}).items():
            wrong += [f"rank {outcome.rank}, {name}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
    assert all(len(o.value) == len(CASES) * len(in_turn(RUNS[ranks], 0)) for o in outcomes)
