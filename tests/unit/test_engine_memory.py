"""What rows hold at most, against a plain loop; and that there is one slack for all comparisons."""

from __future__ import annotations

import ast
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.engine.memory import levels, peaks
from penstock.engine.tolerance import EPSILON, is_within, slack

CHANGES = st.lists(st.lists(st.sampled_from([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]), max_size=12), max_size=5)


def by_hand(row: list[float]) -> float:
    held = most = 0.0
    for change in row:
        held += change
        most = max(most, held)
    return most


@given(CHANGES)
def test_peaks_are_those_of_a_plain_loop(rows: list[list[float]]) -> None:
    first = list(accumulate(map(len, rows), initial=0))
    change = [value for row in rows for value in row]
    assert peaks(change, first) == [by_hand(row) for row in rows]
    for number, row in enumerate(rows):
        assert levels(change, first, number) == list(accumulate(row))


def test_counts_stay_whole_and_an_empty_row_holds_nothing() -> None:
    assert peaks([1, 1, -1, 1, 1], [0, 0, 5]) == [0, 3]
    assert all(isinstance(peak, int) for peak in ps.schedule.peak_in_flight(ps.build("1f1b", 4, 8)))


def test_a_limit_may_be_missed_by_rounding_alone() -> None:
    assert is_within(sum([0.1] * 3), 0.3)
    assert not is_within(0.3 * (1 + 3 * EPSILON), 0.3)
    assert is_within(1e300, float("inf"))
    assert slack(0.0) == EPSILON
    assert slack(-2e6) == slack(2e6) == 2e6 * EPSILON


PLANNING = ("schedule", "dispatch", "simulate", "program", "passes", "library", "planning", "control")


@pytest.mark.parametrize("folder", PLANNING)
def test_no_file_has_a_slack_of_its_own(folder: str) -> None:
    """Two parts of the planner that round differently once called an order both within its cap and above it."""
    own = []
    for path in Path(ps.__file__).parent.joinpath(folder).rglob("*.py"):
        tree = ast.parse(path.read_text())
        values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        values += [side for node in ast.walk(tree) if isinstance(node, ast.BinOp) for side in (node.left, node.right)]
        own += [
            f"{path.name}:{value.lineno}"
            for value in values
            if isinstance(value, ast.Constant) and value.value == EPSILON
        ]
    assert not own
