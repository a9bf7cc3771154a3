"""The protocol of tentative weights: what it asks for, and what it says of what was found."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from experiments.amdp import tentative
from experiments.amdp.tentative import (
    BLOCKS,
    HELD_OUT,
    METHODS,
    OPEN,
    SEEDS,
    SYNCHRONOUS,
    Case,
    Job,
    add,
    best_step,
    finals_of,
    gap_of,
    lines,
    next_steps,
    ready_jobs,
    run,
)
from penstock.models import GPTConfig

pytestmark = pytest.mark.unit

FEW = ((Case(SYNCHRONOUS), Case("tentative")), (Case("none", n=16),))


def carried_out(loss: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    count = 0
    while (job := next(ready_jobs(rows), None)) is not None:
        add(rows, job, loss(job), 1.0)
        count += 1
        assert count < 200
    return rows


def quadratic(job: Job) -> float:
    """A loss that is least two steps above the first rate without a mismatch, and one step below it with one."""
    at = 2 if job.case.method == SYNCHRONOUS else -1
    return 2.0 + 0.01 * (job.step - at) ** 2 + 0.1 * (job.case.method != SYNCHRONOUS) + job.seed / 100


def test_rates_are_searched_on_seeds_that_are_not_judged_until_the_best_is_interior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tentative, "BLOCKS", FEW)
    rows = carried_out(quadratic)
    finals = finals_of(rows)
    for case in [case for block in FEW for case in block]:
        best = best_step(finals, case)
        assert best == (2 if case.method == SYNCHRONOUS else -1)
        assert not next_steps(finals, case)
        assert {step for of_case, step in finals if of_case == case} >= {best - 1, best, best + 1}
        for (of_case, step), found in finals.items():
            if of_case == case:
                assert set(found) == (set(HELD_OUT) | set(SEEDS) if step == best else set(HELD_OUT))


def test_gaps_are_paired_by_seed_and_bounded_by_students_t(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tentative, "BLOCKS", FEW)
    rows = carried_out(quadratic)
    found = gap_of(rows, Case("tentative"))
    assert found is not None
    gaps = [(2.1 + seed / 100) / (2.0 + seed / 100) - 1 for seed in SEEDS]
    mean = sum(gaps) / 8
    error = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 7 / 8)
    assert (found.mean, found.error, found.num_seeds) == (pytest.approx(mean), pytest.approx(error), 8)
    assert found.bound == pytest.approx(mean + 1.895 * error)
    assert gap_of(rows, Case("none", n=16)) is not None, "mismatch 0 is the same for every n"
    shown = list(lines(rows))
    assert f"{mean:+.2%}" in next(line for line in shown if line.startswith("tentative"))
    assert "the protocol is done" in shown[-1]


def test_a_run_that_diverges_has_no_gap_and_is_no_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tentative, "BLOCKS", FEW)
    rows = carried_out(lambda job: None if job.step > 0 or job.seed == 3 else 2.0 + 0.01 * (job.step + 1) ** 2)
    assert best_step(finals_of(rows), Case("tentative")) == -1
    assert gap_of(rows, Case("tentative")) is None


def test_a_part_of_the_protocol_is_told_as_such() -> None:
    rows: list[dict[str, Any]] = []
    for seed in HELD_OUT:
        add(rows, Job(Case("tentative"), seed, 0), 2.0, 1.0)
    assert next_steps(finals_of(rows), Case("tentative")) == [1, -1]
    shown = list(lines(rows))
    assert "so far" in shown[1]
    assert "not done" in shown[-1]


def test_every_case_has_a_case_to_be_compared_with() -> None:
    cases = [case for block in BLOCKS for case in block]
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert case.synchronous in cases
        assert case.method in METHODS
    assert {case.optimizer for case in OPEN} == {"AdamW", "Muon"}


@pytest.mark.slow
def test_a_case_of_each_method_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates of a small model: with a mismatch the third loss differs from the synchronous one."""
    small = GPTConfig(vocab_size=256, context=8, depth=4, width=16, num_heads=2)
    monkeypatch.setattr(tentative, "MODELS", {"GPT .4M": small})
    monkeypatch.setattr(tentative, "WARMUP", 1)
    cases = [Case(method, "NAdam" if method == "vNAG" else "AdamW", 4, 8, 8) for method in METHODS]
    found = {case.method: run(Job(case, 0, 0), 3) for case in cases}
    assert all(loss is not None and loss < 6.0 for loss in found.values())
    same = run(Job(replace(cases[0], n=16), 0, 0), 3)
    assert found[SYNCHRONOUS] == pytest.approx(same, rel=1e-5)
    for method, loss in found.items():
        assert method == SYNCHRONOUS or abs((loss or 0.0) - (found[SYNCHRONOUS] or 0.0)) > 2e-5, method
