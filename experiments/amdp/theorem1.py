"""Theorem 1: what its proof in the paper's Appendix B.3 shows, where the proof breaks, and what holds instead.

    python -m experiments.amdp.theorem1             some seconds
    python -m experiments.amdp.theorem1 --show      what was found last

The paper's model is SGD with gradients that are late by one update:

    theta(t+1) = theta(t) - eta g(theta(t-1)),    E g = F',    E |g - F'|^2 <= sigma^2,    F is L-smooth

**The proof.** (15) bounds the squared distance to the synchronous run by M(t+1) <= A M(t) + B eta^2, where A is
1 + alpha eta. (17) and (18) call a constant times eta^2 its steady state. As A is more than 1, there is none: what
(15) bounds grows as (1 + alpha eta)^t. No refinement can help, since (18) itself is false: on F = cos, which has all
that B.1 assumes, both runs start on the same hill and see the same noise, but some end in different valleys. The
mean squared distance is then about eta, and not eta^2.

**What holds** (ours) compares gradients with each other, and not with another run. By L-smoothness,

    E F(t+1) <= F(t) - eta <F'(t), F'(t-1)> + L eta^2 / 2 (|F'(t-1)|^2 + sigma^2)

where F(t) is F(theta(t)). With <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2 and the Lipschitz bound of F',

    E F(t+1) <= F(t) - eta/2 |F'(t)|^2 - eta/2 (1 - L eta) |F'(t-1)|^2 + eta L^2 / 2 |theta(t) - theta(t-1)|^2
                     + L eta^2 sigma^2 / 2

and E |theta(t) - theta(t-1)|^2 = eta^2 (|F'(t-2)|^2 + sigma^2) at most. Summed over T steps, the squared gradients of
late steps cancel if (eta L)^2 <= 1 - eta L, that is if eta L <= (sqrt(5) - 1) / 2 = 0.618. What is left is

    mean of E |F'(theta(t))|^2  <=  2 (F(theta(0)) - F*) / (eta T) + eta L sigma^2 + (eta L)^2 sigma^2

So the paper's (6) holds for such rates, with an explicit last term, and without a bound on the gradients (A3). At
eta L = 1, which the theorem allows, theta runs in a circle for ever on F = x^2 / 2, with no noise at all.

**Quadratics** in closed form. If a share s of each gradient is late, theta(t+1) = theta(t) - eta L ((1 - s) theta(t)
+ s theta(t-1)) goes to 0 as the larger root of z^2 - (1 - eta L (1 - s)) z + eta L s does. It does so for all eta L
below 2 / (1 - 2 s), or below 1 / s where s is more than a quarter: up to 2 without delay, 4 if a quarter is late, and
1 if everything is.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from experiments.amdp import RESULTS
from experiments.common.command import options
from experiments.common.results import Row, load, save, table

Array = NDArray[np.float64]
GOLDEN = (math.sqrt(5) - 1) / 2
"""The largest eta L for which our bound holds."""
RATES = (0.2, 0.1, 0.05, 0.025)
SHARES = (0.0, 0.25, 0.5, 1.0)
NUM_RUNS, NUM_STEPS, SEED = 20_000, 2_000, 1
FAR = 1.0
"""Two runs on the cosine have parted if they end farther from each other than this; valleys are 2 pi apart."""


def run_on_hill(noise: Iterator[Array], start: Array, rate: float, is_late: bool) -> tuple[Array, float]:
    """SGD on F = cos, as many runs at once as `start` has values.

    Args:
        noise: by step what is added to each run's gradient.

    Returns:
        Where the runs end, and the mean over runs and steps of their squared gradient.
    """
    before, now, squares = start, start, []
    for draws in noise:
        squares.append(float(np.mean(np.sin(now) ** 2)))
        read = before if is_late else now
        before, now = now, now + rate * (np.sin(read) - draws)
    return now, sum(squares) / len(squares)


def distance_bound(rate: float, smooth: float = 1.0, largest: float = 2.0, noise: float = 1.0) -> float:
    """The paper's (18) times eta^2: its bound of the mean squared distance to the synchronous run.

    Args:
        largest: G, the root of the bound of the mean squared gradient.
    """
    return (8 * smooth**2 * largest**2 + 16 * noise**2) / (4 * smooth**2 + 2) * rate**2


def recursion(rate: float, num_steps: int, smooth: float = 1.0, largest: float = 2.0, noise: float = 1.0) -> float:
    """The decimal logarithm of the bound of the mean squared distance after so many steps, by (15) and (16)."""
    factor = 1 + rate + 2 * rate * (1 + rate) * smooth**2
    added = (2 * (1 + rate) * smooth**2 * largest**2 + 4 * noise**2) * rate**2
    growth = num_steps * math.log10(factor)  # beside it the 1 of factor**num_steps - 1 is nothing
    return growth + math.log10(added / (factor - 1))


def gradient_bound(rate: float, num_steps: int, height: float, smooth: float = 1.0, noise: float = 1.0) -> float:
    """Our bound of the mean squared gradient over a run of delay-one SGD, for eta L up to `GOLDEN`.

    Args:
        height: F(theta(0)) - F*.
    """
    return 2 * height / (rate * num_steps) + rate * smooth * noise**2 + (rate * smooth * noise) ** 2


def modulus(rate: float, share: float) -> float:
    """By what factor a step brings theta nearer to 0 on F = x^2 / 2, in the long run; at 1 or more it does not.

    Args:
        rate: eta L. share: of each gradient that is late by one update.
    """
    half = (1 - rate * (1 - share)) / 2
    root = cmath.sqrt(half**2 - rate * share)
    return max(abs(half + root), abs(half - root))


def largest_rate(share: float) -> float:
    """The eta L below which theta goes to 0 on F = x^2 / 2."""
    return 2 / (1 - 2 * share) if 4 * share <= 1 else 1 / share


def run_quadratic(rate: float, share: float, num_steps: int) -> float:
    """By what factor a step brought theta nearer to 0, measured over the last half of a run from 1."""
    before, now, sizes = 1.0, 1.0, []
    for _ in range(num_steps):
        before, now = now, now - rate * ((1 - share) * now + share * before)
        size = math.hypot(before, now)  # of both, as they may pass through 0
        sizes.append(math.log(size))
        before, now = before / size, now / size
    return math.exp(sum(sizes[num_steps // 2 :]) / (num_steps - num_steps // 2))


def rows() -> Iterator[Row]:
    """Two runs on a cosine by rate, and by share the largest rate of a quadratic."""
    for rate in RATES:
        late, squared = run_on_hill(_draws(), np.zeros(NUM_RUNS), rate, True)
        apart = late - run_on_hill(_draws(), np.zeros(NUM_RUNS), rate, False)[0]
        yield {
            "part": "cosine",
            "rate": rate,
            "distance": float(np.mean(apart**2)),
            "bound": distance_bound(rate),
            "recursion": recursion(rate, NUM_STEPS),
            "parted": float(np.mean(np.abs(apart) > FAR)),
            "gradient": squared,
            "gradient_bound": gradient_bound(rate, NUM_STEPS, 2.0),
        }
    for share in SHARES:
        rate = largest_rate(share)
        yield {
            "part": "quadratic",
            "share": share,
            "largest": rate,
            "below": run_quadratic(0.99 * rate, share, 4_000),
            "above": run_quadratic(1.01 * rate, share, 4_000),
        }


def _draws() -> Iterator[Array]:
    """By step 1 or -1 for each run, the same at each call."""
    draw = np.random.default_rng(SEED)
    return (draw.choice([-1.0, 1.0], NUM_RUNS) for _ in range(NUM_STEPS))


def lines(found: Sequence[Row]) -> Iterator[str]:
    """Both tables."""
    yield f"F = cos, {NUM_STEPS:,} steps, {NUM_RUNS:,} pairs of runs with the same noise of 1 or -1, L = 1, G = 2"
    head = [
        "eta",
        "squared distance",
        "(18) says",
        "(15) bounds",
        "in other valleys",
        "squared gradient",
        "our bound",
    ]
    body = [
        [
            f"{row['rate']:g}",
            f"{row['distance']:.3f}",
            f"{row['bound']:.3f}",
            f"1e{row['recursion']:.0f}",
            f"{row['parted']:.1%}",
            f"{row['gradient']:.4f}",
            f"{row['gradient_bound']:.4f}",
        ]
        for row in found
        if row["part"] == "cosine"
    ]
    yield from table(head, body)
    yield ""
    yield "F = x^2 / 2: the factor of a step, measured 1% below the largest eta L of the closed form, and 1% above"
    body = [
        [f"{row['share']:g}", f"{row['largest']:g}", f"{row['below']:.4f}", f"{row['above']:.4f}"]
        for row in found
        if row["part"] == "quadratic"
    ]
    yield from table(["share that is late", "largest eta L", "below", "above"], body)


def main() -> None:
    given = options(__doc__, RESULTS, show=True).parse_args()
    if not given.show:
        save(given.out, "theorem1", list(rows()), seeds=[SEED])
    print("\n".join(lines(load(given.out, "theorem1"))))


if __name__ == "__main__":
    main()
