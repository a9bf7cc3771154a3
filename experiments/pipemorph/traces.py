"""Links whose delays change all the time: the paper's dynamic stragglers (Figure 18) and its bursty hour (Figure 22).

Traces A, B, C: the latency of each link is drawn from N(30, 10) ms and drawn again after U(50, 100), U(100, 200),
U(200, 400) ms. The bursty trace: each link has a series of its own with median 13, mean 22.3 and 99th percentile
79.3 ms, as the paper reports of its hour; how these follow one another in time it does not report: here they come
in bursts, worst in the middle. A shorter trace has the same values in fewer seconds each.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean, median

from experiments.pipemorph.setups import BASE, Link
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import RandomSteps, Trace

INTERVALS = {"A": (50.0, 100.0), "B": (100.0, 200.0), "C": (200.0, 400.0)}
QUANTILES = ((0.0, 1.0), (0.25, 6.5), (0.5, 13.0), (0.75, 30.0), (0.9, 56.5), (0.99, 79.3), (1.0, 110.0))
"""Shares and delays (ms) of the bursty trace; between them straight lines. Their mean is 22.3."""


def trace_of(name: str, links: Sequence[Link], minutes: float, seed: int) -> Links:
    """The links' conditions over time: "A", "B", "C" or "bursty", which lasts `minutes`."""
    if name in INTERVALS:
        shortest, longest = INTERVALS[name]
        drawn = RandomSteps("normal", 30.0, 10.0, shortest, longest, seed)
        return Links({link: LinkCondition(drawn) for link in links}, base=BASE)
    found = {link: LinkCondition(bursty(minutes, f"{seed} {link}")) for link in links}
    return Links(found, base=BASE)


def bursty(minutes: float, seed: str) -> Trace:
    """One value a second. The order is that of a noise with memory, highest in the middle; the values are those of
    `QUANTILES`, so their median, mean and percentiles are met exactly."""
    rng = random.Random(seed)
    count = max(2, round(minutes * 60))
    level, noise = 0.0, []
    for second in range(count):
        level = 0.9 * level + rng.gauss(0, math.sqrt(1 - 0.9**2))
        noise.append(level + 1.5 * math.exp(-(((second / count - 0.53) / 0.17) ** 2)))
    order = sorted(range(count), key=noise.__getitem__)
    values = [0.0] * count
    for place, second in enumerate(order):
        values[second] = quantile((place + 0.5) / count)
    return Trace(tuple(1e3 * second for second in range(count)), tuple(values))


def quantile(share: float) -> float:
    at = min(bisect_right([s for s, _ in QUANTILES], share), len(QUANTILES) - 1)
    (s0, v0), (s1, v1) = QUANTILES[at - 1], QUANTILES[at]
    return v0 + (v1 - v0) * (share - s0) / (s1 - s0)


def summary(conditions: Links, until: float, links: Sequence[Link]) -> dict[str, float]:
    values = sorted(
        condition.latency.at(until * k / 2000, f"{link[0]}:{link[1]} latency")
        for link in links
        for k in range(2000)
        if (condition := conditions.named(*link)[1]) is not None
    )
    return {"median": median(values), "mean": fmean(values), "p99": values[int(0.99 * len(values))]}
