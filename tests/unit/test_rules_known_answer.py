"""A pipeline under every rule: equal to NumPy's, worked out by hand, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from rules_by_hand import CASES, RATES, Array, ByHand, Scale, Sgd, sgd
from torch import nn

import penstock as ps
from penstock.runtime import RuntimeFailure
from penstock.schedule import Schedule, Updates

pytestmark = pytest.mark.unit


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def with_rule(schedule: Schedule, rule: str) -> Schedule:
    assert schedule.updates is not None
    return replace(schedule, updates=Updates(schedule.updates.window, None, rule))


def batches(num_passes: int, num: int, draw: np.random.Generator) -> Iterator[tuple[list[Array], list[Array]]]:
    for _ in range(num_passes):
        x, t = ([draw.uniform(-1, 1, 2) for _ in range(num)] for _ in "xt")
        yield x, t


def step(pipe: ps.Pipeline, x: list[Array], t: list[Array], rates: list[float]) -> ps.runtime.StepResult:
    """One pass, of microbatches of one sample."""
    inputs, targets = ([torch.from_numpy(a)[None] for a in each] for each in (x, t))
    return pipe.step(inputs, targets, rates=rates)


def require_equal(pipe: ps.Pipeline, want: list[list[Array]]) -> None:
    found = [p.detach().numpy() for _, p in pipe.named_parameters()]
    for ours, theirs in zip(found, [w for stage in want for w in stage], strict=True):
        assert np.isfinite(theirs).all()
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_worked_out_by_hand(name: str, p: int) -> None:
    case = CASES[name]
    num_updates, draw = 8, np.random.default_rng(p)
    weights = [[draw.uniform(0.5, 1.5, 2) for _ in "uv"] for _ in range(p)]
    by_hand = ByHand(case.rule, case.n, [list(w) for w in weights], [[case.by_hand() for _ in "uv"] for _ in weights])
    schedule = with_rule(ps.build("pipedream", p, num_updates * case.n, window=case.n), case.rule)
    pipe = ps.Pipeline([Scale(*w) for w in weights], schedule, loss_fn=squared, optimizer=case.optimizer)
    for n_pass, (x, t) in enumerate(batches(2, num_updates * case.n, draw)):
        rates = list(case.rates[n_pass : n_pass + num_updates])
        by_hand.one_pass(x, t, rates)
        result = step(pipe, x, t, rates)
        require_equal(pipe, by_hand.weights)
        assert len(result.window_losses) == num_updates
    assert pipe.num_updates == 2 * num_updates
    assert pipe.mismatch() == ps.schedule.count_mismatch(schedule)


@pytest.mark.parametrize("zero", [True, False])
def test_amdp_trains_as_worked_out_by_hand(zero: bool) -> None:
    """Two pipelines over four ranks: ops read what is newest on their own copy, which the order says."""
    d, n, num = 4, 8, 32
    draw = np.random.default_rng(2)
    schedule = ps.build("amdp", d, num, window=n)
    assert max(ps.schedule.count_mismatch(schedule).values()) == 1
    weights = [[draw.uniform(0.5, 1.5, 2) for _ in "uv"] for _ in range(d)]
    optimizers = [[Sgd(0.75) for _ in "uv"] for _ in range(d)]
    pipe = ps.Pipeline(
        [Scale(*w) for w in weights],
        schedule,
        loss_fn=squared,
        optimizer=sgd(0.75),
        parallel=ps.ParallelOptions(sharding="copies" if zero else "none"),
    )
    before = updates_before(schedule)
    for x, t in batches(2, num, draw):
        rates = RATES[:4]
        versions, losses = [weights], []
        for m in range(num):
            h, saved = x[m], []
            for i in range(d):
                u, v = versions[before["F", i, m]][i]
                saved.append((h, u * h))
                h = v * (u * h)
            losses.append((h - t[m]) ** 2)
            g = (h - t[m]) / n
            if m % n == 0:
                sums = [[[0.0, 0.0] for _ in range(d)] for _ in range(2)]  # [pipeline][stage][u or v]
            for i in reversed(range(d)):
                u, v = versions[before["B", i, m]][i]
                own = sums[m % 2][i]
                own[1] = own[1] + g * saved[i][1]
                own[0] = own[0] + g * v * saved[i][0]
                g = g * v * u
            if m % n == n - 1:
                lr = rates[m // n]
                weights = [
                    [optimizers[i][k].step(weights[i][k], sums[0][i][k] + sums[1][i][k], lr) for k in (0, 1)]
                    for i in range(d)
                ]
                versions.append(weights)
        result = step(pipe, x, t, rates)
        require_equal(pipe, weights)
        by_window = [np.mean(losses[k * n : (k + 1) * n]) for k in range(num // n)]
        np.testing.assert_allclose(result.window_losses.numpy(), by_window, rtol=1e-14)
    assert pipe.mismatch() == ps.schedule.count_mismatch(schedule)


def updates_before(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """By (kind, stage, microbatch), the updates of the op's copy that come before it."""
    found: dict[tuple[str, int, int], int] = {}
    for row in schedule.order:
        for place, (kind, stage, m) in enumerate(row):
            if kind != "U":
                copies_updates = [u for k, s, u in row[:place] if k == "U" and s == stage and u % 2 == m % 2]
                found[kind, stage, m] = len(copies_updates)
    return found


def test_every_rule_trains_to_weights_of_its_own() -> None:
    """Or else the cases above would not tell the rules apart."""
    draw = np.random.default_rng(0)
    x, t = next(batches(1, 8, draw))
    found = {}
    for rule in ("none", "pipedream", "pipedream-2bw", "spectrain"):
        stages = [Scale(np.array([0.75, 1.25]), np.array([1.5, 0.5])) for _ in range(2)]
        window = 2 if rule == "pipedream-2bw" else 1
        schedule = with_rule(ps.build("pipedream", 2, 8, window=window), rule)
        pipe = ps.Pipeline(stages, schedule, loss_fn=squared, optimizer=sgd(0.5))
        step(pipe, x, t, [0.125] * (8 // window))
        found[rule] = tuple(float(w) for p in pipe.parameters() for w in p.detach())
    assert len(set(found.values())) == len(found)


def test_a_rule_that_does_not_go_with_the_optimizer_is_refused_before_anything_runs() -> None:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for rule in ("spectrain", "xpipe", "vnag"):
        schedule = with_rule(ps.build("pipedream", 2, 4, window=1), rule)
        with pytest.raises(RuntimeFailure, match=f"rule '{rule}'.*use torch.optim"):
            ps.Pipeline(stages, schedule, loss_fn=squared, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
