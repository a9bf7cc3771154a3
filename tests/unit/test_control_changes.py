"""Change points: few false ones whatever the noise, true ones at once, and no flapping."""

import math
import random
from collections.abc import Callable

import pytest

from penstock.control.changes import USUAL, Detector
from tiers import others_nightly

pytestmark = pytest.mark.unit

Noise = Callable[[random.Random], float]


def student(rng: random.Random) -> float:
    return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)


NOISES: dict[str, Noise] = {
    "normal 3%, 1% spikes of 1.5": lambda rng: rng.gauss(1, 0.03) * (1.5 if rng.random() < 0.01 else 1.0),
    "normal 20%": lambda rng: max(0.0, rng.gauss(1, 0.2)),
    "log-normal 30%": lambda rng: math.exp(rng.gauss(0, 0.3)),
    "uniform": lambda rng: rng.uniform(0.5, 1.5),
    "heavy tails": lambda rng: max(0.0, 1 + 0.1 * student(rng)),
    "two levels": lambda rng: rng.choice((1.0, 1.3)) * rng.gauss(1, 0.02),
}


@pytest.mark.parametrize("seed", others_nightly(range(10), range(3)))
@pytest.mark.parametrize("noise", NOISES)
def test_noise_alone_makes_at_most_one_change_in_1000_iterations(noise: str, seed: int) -> None:
    rng, detector = random.Random(f"{noise} {seed}"), Detector(least=1.0)
    changes = 0
    for _ in range(1000):
        # Both halves of an iteration are hit alike: the worst case.
        value = 10 * NOISES[noise](rng)
        changes += sum(detector.feed(half) is not None for half in (value, value * rng.gauss(1, 0.01)))
    assert changes <= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [n for n in NOISES if n not in ("two levels", "uniform")])
def test_a_link_60_ms_late_is_verified_by_the_third_number(noise: str, seed: int) -> None:
    rng, detector = random.Random(f"{noise} {seed}"), Detector(least=1.0)
    for _ in range(200):
        detector.feed(10 * NOISES[noise](rng))
    found = [detector.feed(60 + 10 * NOISES[noise](rng)) for _ in range(3)]
    (change,) = [change for change in found if change]
    assert change.rose
    assert change.before == pytest.approx(10, rel=0.2)
    assert change.after == pytest.approx(70, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_a_rise_by_half_is_verified_within_three_iterations(seed: int) -> None:
    rng, detector = random.Random(seed), Detector(least=1.0)
    for _ in range(200):
        detector.feed(20 * rng.gauss(1, 0.03))
    found = [detector.feed(30 * rng.gauss(1, 0.03)) is not None for _ in range(5)]
    assert found == [False, False, False, False, True]


def test_one_slow_iteration_is_no_change() -> None:
    detector = Detector(least=1.0)
    for value in [5.0] * 10 + [50.0] * 2 + [5.0] * 10:
        assert detector.feed(value) is None


def test_a_change_too_small_to_matter_is_none() -> None:
    detector = Detector(least=1.0)
    for value in [0.0] * 10 + [0.9] * 20:
        assert detector.feed(value) is None
        assert detector.pending == 0


def test_a_fall_needs_more_than_a_rise() -> None:
    detector = Detector(least=1.0)
    for value in [5.0] * 10 + [50.0] * 3:
        detector.feed(value)
    assert detector.level == 50.0
    for _ in range(USUAL.calibration):
        detector.feed(50.0)
    falls = [detector.feed(5.0) is not None for _ in range(USUAL.fall)]
    assert falls == [False] * (USUAL.fall - 1) + [True]


def test_each_early_rise_makes_the_next_fall_harder_up_to_a_limit() -> None:
    detector = Detector(1.0)
    for _ in range(10):
        detector.feed(5.0)
    needed = []
    for _ in range(6):
        while not ((change := detector.feed(50.0)) and change.rose):
            pass
        for _ in range(USUAL.calibration):
            detector.feed(50.0)
        count = 1
        while detector.feed(5.0) is None:
            count += 1
        needed.append(count)
        for _ in range(USUAL.calibration):
            detector.feed(5.0)
    assert needed == [12, 24, 48, 96, 192, 192]


def test_a_long_calm_forgives() -> None:
    detector = Detector(1.0)
    for value in [5.0] * 10 + [50.0] * 10 + [5.0] * 30 + [50.0] * 10 + [5.0] * 30:
        detector.feed(value)
    for value in [5.0] * 200 + [50.0] * 10:
        detector.feed(value)
    assert [detector.feed(5.0) is not None for _ in range(USUAL.fall)][-1]
