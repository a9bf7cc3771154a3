"""A CLIP of three towers with mixed schedules, one process a rank."""

from __future__ import annotations

import pytest

import clip_runs as runs
from penstock.models import CLIPStages
from processes import run_ranks

pytestmark = pytest.mark.multiproc


EVEN, GATHERED = runs.SIZES
CASES = [(EVEN, "dynamic", True), (GATHERED, "frozen", False), (GATHERED, "dynamic", True)]


def run_all(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, dispatch, split in CASES:
        program = runs.program(runs.SIZES[name], split)
        cut = CLIPStages.of(runs.NANO, program)
        found[f"{name}, {dispatch}"] = runs.wrong(runs.SIZES[name], program.build(), cut, dispatch)
    return found


@pytest.mark.slow
def test_loss_gradients_and_order_over_five_ranks() -> None:
    outcomes = run_ranks(5, run_all)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    assert all(len(o.value) == len(CASES) for o in outcomes)
    found = [f"rank {o.rank}, {run}: {text}" for o in outcomes for run, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)
