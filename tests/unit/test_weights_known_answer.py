"""The weights of copies, driven by hand, under every rule: equal to NumPy's, worked out by hand, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rules_by_hand import CASES, ByHand, Scale, sgd
from weights_loop import Loop

import penstock as ps
from penstock.schedule import Schedule, Updates

pytestmark = pytest.mark.unit


def pipedream(p: int, num: int, window: int, rule: str) -> Schedule:
    schedule = ps.build("pipedream", p, num, window=window)
    schedule = replace(schedule, updates=Updates(window, None, rule))
    ps.check(schedule)
    return schedule


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_linear_model_trains_as_worked_out_by_hand(name: str, p: int) -> None:
    case = CASES[name]
    draw = np.random.default_rng(p)
    weights = [[draw.uniform(0.5, 1.5, 2) for _ in "uv"] for _ in range(p)]
    by_hand = ByHand(case.rule, case.n, [list(w) for w in weights], [[case.by_hand() for _ in "uv"] for _ in weights])
    stages = [Scale(*w) for w in weights]
    num_updates = 8
    loop = Loop([stages], pipedream(p, num_updates * case.n, case.n, case.rule), case.optimizer)
    for n_pass in range(2):
        rates = list(case.rates[n_pass : n_pass + num_updates])
        x, t = ([draw.uniform(-1, 1, 2) for _ in range(num_updates * case.n)] for _ in "xt")
        by_hand.one_pass(x, t, rates)
        loop.run([torch.from_numpy(a) for a in x], [torch.from_numpy(a) for a in t], rates)
        for stage, want in zip(stages, by_hand.weights, strict=True):
            assert np.isfinite(want).all()
            # A lower rate for late stages is a factor more, which may be rounded elsewhere.
            close = 1e-12 if "-lr" in name else 0.0
            np.testing.assert_allclose(stage.u.detach().numpy(), want[0], rtol=close, atol=0.0)
            np.testing.assert_allclose(stage.v.detach().numpy(), want[1], rtol=close, atol=0.0)
    assert all(w.num_updates == 2 * num_updates for w in loop.weights.values())


def test_every_rule_trains_to_weights_of_its_own() -> None:
    """Or else the cases above would not tell the rules apart."""
    draw = np.random.default_rng(0)
    x, t = ([torch.from_numpy(draw.uniform(-1, 1, 2)) for _ in range(8)] for _ in "xt")
    found = {}
    for rule, make in {
        "none": sgd(0.5),
        "pipedream": sgd(0.5),
        "pipedream-2bw": sgd(0.5),
        "spectrain": sgd(0.5),
    }.items():
        stages = [Scale(np.array([0.75, 1.25]), np.array([1.5, 0.5])) for _ in range(2)]
        Loop([stages], pipedream(2, 8, 1 if rule != "pipedream-2bw" else 2, rule), make).run(x, t, [0.125] * 8)
        found[rule] = tuple(float(w) for stage in stages for w in (*stage.u.detach(), *stage.v.detach()))
    assert len(set(found.values())) == len(found)
