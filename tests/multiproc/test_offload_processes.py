"""Activations that wait in host memory while messages come from another process: models of the table, to the bit."""

from __future__ import annotations

import warnings

import pytest

import penstock as ps
from backends import Backend
from offload_programs import offloaded
from runtime_cases import CASES, compare
from tiers import in_turn

pytestmark = pytest.mark.multiproc

RUNS = [("zb-v", "frozen", True, 1), ("1f1b", "dynamic", False, 2)]


def run_cases(rank: int, ranks: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    found = {}
    for number, name in enumerate(list(CASES)[::3]):
        for schedule, dispatch, defer, every in in_turn(RUNS, number):
            built = offloaded(ps.build(schedule, ranks, 4), every)
            found[f"{name}, {schedule}, {dispatch}"] = compare(name, built, dispatch, defer)
    return found


@pytest.mark.slow
def test_as_the_plain_loop() -> None:
    assert not Backend(2).wrong(run_cases, 2)
