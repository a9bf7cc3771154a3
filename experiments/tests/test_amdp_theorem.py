"""Theorem 1 of AMDP: where its proof breaks, and what holds of SGD with gradients that are late by one update."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.amdp.theorem1 import (
    GOLDEN,
    distance_bound,
    gradient_bound,
    largest_rate,
    modulus,
    recursion,
    run_on_hill,
    run_quadratic,
)

pytestmark = pytest.mark.unit


def test_what_15_bounds_grows_and_has_no_steady_state() -> None:
    short, long = recursion(0.01, 1_000), recursion(0.01, 2_000)
    assert long - short == pytest.approx(1_000 * math.log10(1 + 0.01 + 0.02 * 1.01), rel=1e-9)


def test_the_distance_to_the_synchronous_run_is_no_multiple_of_the_rate_squared() -> None:
    """Equation (18) says so. F = cos has all that is assumed: L = 1, noise of variance 1, gradients of at most 2."""
    distance = {}
    for rate in (0.1, 0.025):
        found = []
        for is_late in (True, False):
            draw = np.random.default_rng(3)
            noise = (draw.choice([-1.0, 1.0], 4_000) for _ in range(round(120 / rate)))
            found.append(run_on_hill(noise, np.zeros(4_000), rate, is_late)[0])
        distance[rate] = np.mean((found[0] - found[1]) ** 2)
        assert distance[rate] > 3 * distance_bound(rate)
    assert distance[0.1] / distance[0.025] < 8, "four times the rate: 16 times the distance if it were its square"


@pytest.mark.parametrize("rate", [0.05, 0.2, GOLDEN])
def test_our_bound_of_the_mean_squared_gradient_holds(rate: float) -> None:
    draw = np.random.default_rng(5)
    noise = (draw.standard_normal(2_000) for _ in range(400))
    squared = run_on_hill(noise, np.zeros(2_000), rate, True)[1]
    assert 0.2 * gradient_bound(rate, 400, 2.0) < squared < gradient_bound(rate, 400, 2.0)


@given(st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_a_quadratic_converges_as_its_roots_say(part: float, share: float) -> None:
    rate = part * largest_rate(share)
    assert modulus(0.999 * rate, share) < 1
    assert modulus(1.001 * largest_rate(share), share) > 1


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.5, 1.0])
def test_a_run_brings_a_quadratic_nearer_to_0_by_the_larger_root(share: float) -> None:
    for part in (0.6, 0.99, 1.01):
        rate = part * largest_rate(share)
        assert run_quadratic(rate, share, 4_000) == pytest.approx(modulus(rate, share), abs=2e-3)


def test_at_the_rate_that_the_theorem_allows_theta_runs_in_a_circle() -> None:
    before, now, seen = 1.0, 1.0, []
    for _ in range(12):
        before, now = now, now - before
        seen.append(now)
    assert seen == [0, -1, -1, 0, 1, 1] * 2
    assert modulus(1.0, 1.0) == pytest.approx(1)
