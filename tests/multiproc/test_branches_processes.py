"""Stages that branch and join, one process a rank."""

from __future__ import annotations

import pytest

import branches_runs as runs
from processes import run_ranks
from tiers import in_turn

pytestmark = pytest.mark.multiproc


WAYS = [("frozen", False), ("dynamic", True), ("frozen", True), ("dynamic", False)]
"""The dispatch, and whether backwards are split."""


def run_all(rank: int, names: list[str]) -> dict[str, list[str]]:
    return {
        f"{name} {dispatch} {split}": runs.wrong(name, dispatch, split, exact=name in runs.EVEN)
        for number, name in enumerate(names)
        for dispatch, split in in_turn(WAYS, number)
    }


@pytest.mark.parametrize("ranks", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_as_the_plain_loop(ranks: int) -> None:
    names = [name for name, graph in runs.GRAPHS.items() if graph.num_stages == ranks]
    outcomes = run_ranks(ranks, run_all, names)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    found = [f"rank {o.rank}, {run}: {text}" for o in outcomes for run, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)
    assert all(len(o.value) == len(in_turn(WAYS, 0)) * len(names) for o in outcomes)
