"""Forwards run again from messages that came from another process: every case of the table, to the last bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import penstock as ps
from processes import run_ranks
from recomputed import with_recompute
from runtime_cases import CASES, compare
from tiers import chosen, in_turn

pytestmark = pytest.mark.multiproc

RUNS = [("zb-v", "frozen", True, 1), ("1f1b", "dynamic", False, 2)]
SAMPLE = chosen(CASES, list(CASES)[::2])
"""Half of them, by day; all run in one process (tests/unit/test_runtime_recompute.py)."""


def run_cases(rank: int, ranks: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    found = {}
    for number, name in enumerate(SAMPLE):
        for schedule, dispatch, defer, every in in_turn(RUNS, number):
            built = with_recompute(ps.build(schedule, ranks, 4), every)
            found[f"{name}, {schedule}, {dispatch}"] = compare(name, built, dispatch, defer)
    return found


@pytest.mark.slow
def test_as_the_plain_loop() -> None:
    outcomes = run_ranks(2, run_cases, 2)
    wrong: list[Any] = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    for outcome in outcomes:
        for name, found in (outcome.value or {}).items():
            wrong += [f"rank {outcome.rank}, {name}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
    assert all(len(o.value) == len(SAMPLE) * len(in_turn(RUNS, 0)) for o in outcomes)
