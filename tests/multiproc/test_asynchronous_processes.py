"""Schedules whose updates are ops of the order: one process a rank gives what one process gives, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import asynchronous_runs as runs
from processes import run_ranks

pytestmark = pytest.mark.multiproc


def train_all(rank: int) -> dict[str, Any]:
    return {name: runs.trained(name) for name in runs.RUNS}


@pytest.mark.nightly
def test_fifty_updates_by_every_rule() -> None:
    outcomes = run_ranks(runs.NUM_RANKS, train_all)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    for name in runs.RUNS:
        parameters, losses, mismatch, evaluated = runs.trained(name)
        found: dict[str, torch.Tensor] = {}
        for outcome in outcomes:
            own, its_losses, its_mismatch, its_evaluated = outcome.value[name]
            assert (its_losses, its_mismatch, its_evaluated) == (losses, mismatch, evaluated), name
            found |= own
        assert found.keys() == parameters.keys()
        assert not runs.unlike(parameters, found), name
        assert len(losses) >= 50
