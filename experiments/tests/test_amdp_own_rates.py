"""The protocol by which AMDP and 1f1b are compared at their own rates asks for what it says."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from experiments.amdp import RESULTS
from experiments.amdp.own_rates import (
    DEFAULT,
    GRID,
    HELD_OUT,
    SEEDS,
    SYNC,
    SYNC_MUON,
    SYSTEMS,
    Job,
    best_synchronous,
    lines,
    next_job,
    over,
    own_rate,
)
from experiments.common.results import load

pytestmark = pytest.mark.unit

BEST = {SYNC: 0.004, SYNC_MUON: 0.016, "amdp, mismatch 1": 0.001}
"""Where the losses of systems that are not trained here are least; the others' at the default rate."""


def found(job: Job) -> dict[str, Any]:
    """A loss that grows with the distance from the best rate."""
    away = abs(math.log2(job.rate / BEST.get(job.name, 0.004)))
    loss = 2 + 0.1 * away + 0.01 * job.seed + (0.02 if "amdp" in job.name else 0) - (0.5 if "Muon" in job.name else 0)
    return {**asdict(job), "loss": loss, "seconds": 1.0}


def whole_protocol() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while (job := next_job(rows)) is not None:
        rows.append(found(job))
    return rows


def test_every_rate_has_a_worse_one_on_either_side() -> None:
    rows = whole_protocol()
    for name, system in SYSTEMS.items():
        tried = sorted(row["rate"] for row in rows if row["part"] == "rates" and row["name"] == name)
        if system.rate_of:
            assert not tried
            continue
        best = BEST.get(name, 0.004)
        assert own_rate(rows, name) == best
        assert tried == sorted({*GRID, *(best * factor for factor in (0.5, 1, 2))})


def test_no_judged_seed_chooses_a_rate() -> None:
    rows = whole_protocol()
    assert HELD_OUT not in SEEDS
    assert {row["seed"] for row in rows if row["part"] == "rates"} == {HELD_OUT}
    judged = [row for row in rows if row["part"] == "judged"]
    assert [(row["seed"], row["name"]) for row in judged] == [(seed, name) for seed in SEEDS for name in SYSTEMS]
    assert all(row["rate"] == own_rate(rows, row["name"]) for row in judged)
    assert own_rate(rows, DEFAULT) == own_rate(rows, SYNC)


def test_a_run_without_a_finite_loss_is_worse_than_any_other() -> None:
    rows = [found(Job("rates", SYNC, HELD_OUT, rate)) for rate in GRID]
    rows[-1]["loss"] = None
    assert own_rate(rows, SYNC) == 0.004


def test_a_system_is_compared_with_its_own_optimizer_and_with_the_best() -> None:
    rows = whole_protocol()
    assert best_synchronous(rows) == SYNC_MUON
    name = "amdp, mismatch 1"
    assert over(rows, name, SYSTEMS[name].like) == pytest.approx([0.02 / (2 + 0.01 * seed) for seed in SEEDS])
    assert over(rows, name, SYNC_MUON) == pytest.approx([2.02 / 1.5 - 1, 2.03 / 1.51 - 1, 2.04 / 1.52 - 1])
    text = "\n".join(lines(rows))
    assert "the protocol is done" in text
    assert "the best in the last column is 1f1b, Muon" in text


def test_the_committed_runs_are_those_that_the_protocol_asks_for() -> None:
    rows = load(RESULTS, "own_rates")
    for done, row in enumerate(rows):
        asked = next_job(rows[:done])
        assert asked is not None
        assert {name: row[name] for name in asdict(asked)} == asdict(asked)
    assert next_job(rows) is None
