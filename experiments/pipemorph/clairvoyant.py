"""The clairvoyant schedule: it knows the delays of an iteration before that begins, and switches for nothing.

The best of many candidates, one of them from `ps.plan`, each simulated on just those delays, and improved by a
local search over warm-up counts. It is the best that was found, not a proven bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

import penstock as ps
from penstock.control import Configuration, Job, run_once
from penstock.cost import Links
from penstock.planning import adapted_warmups, initial_warmups, slow_link_schedule

SEARCH = 1.0
"""Seconds that `ps.plan` searches, with the mean delays of the iteration."""


def clairvoyant(job: Job, conditions: Links, at: float) -> float:
    """The shortest iteration (ms) found by a search that knows the delays to come.

    What may wait in host memory counts as memory of the device, so the search has no copies to make.
    """
    num, num_microbatches = job.num_ranks, job.start.schedule.num_microbatches
    links = tuple((rank, rank + 1) for rank in range(num - 1))
    caps = tuple(cap + more for cap, more in zip(job.start.caps, job.host_limits, strict=True))
    ideal = job.mean_op * (3 * num_microbatches + 2 * (num - 1))
    seen = [conditions.named(*link)[1] for link in links]
    delays = []
    for link, condition in zip(links, seen, strict=True):
        assert condition is not None
        name = f"{link[0]}:{link[1]} latency"
        delays.append([condition.latency.at(at + ideal * k / 40, name) for k in range(50)])
    counts: dict[tuple[int, ...], None] = {}
    for pick in (min, median, fmean, max):
        late = ps.Links({link: float(pick(row)) for link, row in zip(links, delays, strict=True)})
        for room in ([c / a for c, a in zip(caps, job.costs.activation, strict=True)], None):
            found = adapted_warmups(job.costs, late, num_microbatches, max_in_flight=room)
            counts[found] = None
    counts[initial_warmups(num, num_microbatches, caps, job.costs.activation)] = None
    counts[tuple(min(num_microbatches, 2 * (num - rank) - 1) for rank in range(num))] = None
    typical = ps.Links({link: fmean(row) for link, row in zip(links, delays, strict=True)})

    def run(warmup: tuple[int, ...]) -> float:
        best = math.inf
        for rule in ("priority", "alternate"):
            schedule = slow_link_schedule(
                job.costs, num_microbatches, typical, warmup=warmup, memory_limit=list(caps), rule=rule
            )
            for dispatch in ("frozen", "dynamic"):
                ms = run_once(job, Configuration(schedule, dispatch, links, caps), conditions, at).makespan
                best = min(best, ms)
        return best

    tried = {warmup: run(warmup) for warmup in counts if fits(warmup, job.costs, caps)}
    rng = random.Random(0)
    for _ in range(8):
        now = min(tried, key=tried.__getitem__)
        neighbour = list(now)
        rank = rng.randrange(num)
        neighbour[rank] += rng.choice((-1, 1))
        warmup = tuple(neighbour)
        falling = all(a >= b for a, b in pairwise(warmup))
        if falling and warmup[-1] >= 1 and max(warmup) <= num_microbatches and fits(warmup, job.costs, caps):
            tried.setdefault(warmup, math.inf)
            tried[warmup] = min(tried[warmup], run(warmup))
    planned = ps.plan(job.costs, num, num_microbatches, typical, memory_limit=list(caps), time_limit=SEARCH).schedule
    others = [
        run_once(job, Configuration(schedule, dispatch, links, caps), conditions, at).makespan
        for schedule in (job.start.schedule, planned)
        for dispatch in ("frozen", "dynamic")
    ]
    return min(*tried.values(), *others)


def fits(warmup: Sequence[int], costs: ps.Costs, caps: Sequence[float]) -> bool:
    """Whether warm-up counts have room."""
    return all(count * kept <= cap for count, kept, cap in zip(warmup, costs.activation, caps, strict=True))
