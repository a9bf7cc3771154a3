"""Schedules with several pipelines, one process a rank: gradients and values of a loop grouped alike, to the bit."""

from __future__ import annotations

import pytest

import copies_runs
from processes import run_ranks

pytestmark = pytest.mark.multiproc


def run_all(rank: int) -> dict[str, list[str]]:
    return {
        f"{name} {options} zero={zero}": copies_runs.wrong(name, options, zero)
        for name, options in copies_runs.SCHEDULES
        for zero in (True, False)
    }


@pytest.mark.slow
def test_a_grouped_loop() -> None:
    outcomes = run_ranks(4, run_all, deadline=100)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    found = [f"rank {o.rank}, {run}: {text}" for o in outcomes for run, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)
    assert all(len(o.value) == 2 * len(copies_runs.SCHEDULES) for o in outcomes)
