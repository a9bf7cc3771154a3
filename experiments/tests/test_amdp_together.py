"""Runs of the AMDP experiments that are trained as one model come to what each comes to alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from experiments.amdp.convergence import HELD_OUT, MODELS, Job, ready_jobs, row_of, run, together
from experiments.amdp.learning import Method, Task, goes_together, train, train_together
from experiments.amdp.together import RunByRun, stacked
from tiers import others_nightly

pytestmark = pytest.mark.unit


def tasks(model: str, *seeds: int) -> list[Task]:
    config: Any = replace(MODELS[model], width=16, num_heads=2)
    return [Task(config, batch=8, num_batches=4, every=2, warmup=1, seed=seed) for seed in seeds]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("GPT", Method("synchronous", "1f1b", optimizer="SGD", peak=0.05)),
        pytest.param("GPT", Method("amdp", "amdp"), marks=pytest.mark.nightly),
        pytest.param("BERT", Method("amdp, Muon", "amdp", optimizer="Muon"), marks=pytest.mark.nightly),
        pytest.param("BERT", Method("xpipe", "xpipe", optimizer="Adam"), marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_runs_of_several_seeds_are_each_what_they_are_alone(model: str, method: Method) -> None:
    if not goes_together(method):
        pytest.fail(f"{method.name} is to go together")
    found = train_together([method, replace(method, seed=7)], tasks(model, 0, 1))
    alone = [train(method, tasks(model, 0)[0]), train(replace(method, seed=7), tasks(model, 1)[0])]
    for one, other in zip(found, alone, strict=True):
        assert one["curve"] == [(batches, pytest.approx(loss, abs=2e-4)) for batches, loss in other["curve"]]
        assert one["final"] == one["curve"][-1][1]
        assert one["mismatch"] == other["mismatch"]
    assert abs(found[0]["final"] - found[1]["final"]) > 1e-3, "the two must be told apart"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", others_nightly(["AdamW", "Muon"], ["AdamW"]))
def test_each_run_has_its_own_rate_and_one_that_diverges_ends_alone(optimizer: str) -> None:
    method = Method("amdp", "amdp", optimizer=optimizer)
    methods = [replace(method, peak=peak) for peak in (0.02, 0.005, 1e30)]
    found = train_together(methods, tasks("GPT", 100, 100, 100))
    for row, peak in zip(found[:2], (0.02, 0.005), strict=True):
        assert row["peak"] == peak
        assert row["final"] == pytest.approx(
            train(replace(method, peak=peak), tasks("GPT", 100)[0])["final"], abs=2e-4
        )
    assert found[2]["final"] is None


def test_a_slice_steps_as_its_own_parameter_does() -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(2, 5, 3))
    apart = [nn.Parameter(part.clone()) for part in stack.detach()]
    optimizer = RunByRun([stack], torch.optim.AdamW, 0.1, [1.0, 0.25])
    plain = [torch.optim.AdamW([part], lr=rate) for part, rate in zip(apart, (0.2, 0.05), strict=True)]
    optimizer.param_groups[0]["lr"] = 0.2
    for _ in range(3):
        stack.grad = torch.randn(2, 5, 3)
        for part, gradient in zip(apart, stack.grad, strict=True):
            part.grad = gradient.clone()
        for each in (optimizer, *plain):
            each.step()
    assert torch.equal(stack.detach(), torch.stack([part.detach() for part in apart]))


def test_what_differs_in_more_than_rates_and_seeds_is_refused() -> None:
    one, other = Method("amdp", "amdp"), Method("amdp", "amdp", window=4)
    with pytest.raises(ValueError, match="rates and seeds alone"):
        train_together([one, other], tasks("GPT", 0, 1))
    predicting = Method("xpipe", "xpipe")
    with pytest.raises(ValueError, match="one by one"):
        train_together([predicting, replace(predicting, peak=1e-3)], tasks("GPT", 0, 0))


def test_a_module_without_a_stacked_form_is_refused() -> None:
    with pytest.raises(TypeError, match="Conv1d has parameters of its own"):
        stacked([nn.Sequential(nn.Conv1d(2, 2, 1)) for _ in range(2)])


def test_jobs_of_a_row_are_one_group_where_they_can_be() -> None:
    jobs = [Job("table 1", "GPT", name, seed, 0.004) for seed in (0, 1) for name in ("amdp", "xpipe, Muon")]
    assert together(jobs) == [(jobs[0], jobs[2]), (jobs[1],), (jobs[3],)]
    own = [Job("own", "GPT", name, HELD_OUT, peak) for name in ("amdp", "vnag, windows") for peak in (0.004, 0.002)]
    assert together(own) == [tuple(own[:2]), (own[2],), (own[3],)]
    rates = list(ready_jobs([]))
    assert together(rates) == [(job,) for job in rates]


@pytest.mark.slow
def test_a_group_of_jobs_has_a_row_each() -> None:
    jobs = [Job("own", "GPT", "pipedream", HELD_OUT, peak) for peak in (0.1, 0.05)]
    rows = run(jobs, num_batches=2)
    assert [(row["peak"], row["seed"], row["together"]) for row in rows] == [(0.1, 100, 2), (0.05, 100, 2)]
    assert row_of("pipedream").optimizer == rows[0]["optimizer"] == "SGD"
