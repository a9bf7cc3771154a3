"""Declared orders of microbatches between processes: those of the plain loop in these orders, to the bit."""

from __future__ import annotations

import random

import pytest

import penstock as ps
from ordered_loop import SOME_WORTH, wrong
from penstock.passes import reorder_microbatches, separate_gradients
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc


def schedules() -> dict[str, ps.Schedule]:
    rng = random.Random(0)
    order, other = rng.sample(range(6), 6), rng.sample(range(6), 6)
    deep = reorder_microbatches(ps.build("gpipe", 3, 6), order, "reversed")
    return {
        "1f1b in one order": reorder_microbatches(ps.build("1f1b", 3, 6), order, order),
        "zb-v in one order": reorder_microbatches(ps.build("zb-v", 3, 6), order, order),
        "gpipe, backwards reversed and some split": separate_gradients(deep),
        "gpipe, one stage's backwards in another order": reorder_microbatches(deep, backward=other, stages=[1]),
    }


def run_all(rank: int) -> dict[str, list[str]]:
    return {
        f"{name}, {dispatch}": wrong(schedule, dispatch, merge, extra=3, tied=True)
        for name, schedule in schedules().items()
        for dispatch, merge in (("frozen", SOME_WORTH), ("dynamic", 0))
    }


@pytest.mark.slow
def test_declared_orders() -> None:
    outcomes = run_ranks_to_end(3, run_all)
    found = [f"rank {o.rank}, {run}: {text}" for o in outcomes for run, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)
    assert all(len(o.value) == 8 for o in outcomes)
