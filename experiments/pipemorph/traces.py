"""PipeMorph's dynamic stragglers (Figures 18 and 22) as simulation, with the controller in the loop.

    python experiments/pipemorph/traces.py                  all traces; the bursty one for its whole hour
    python experiments/pipemorph/traces.py --trace A --minutes 2

Traces A, B, C: 4 ranks, 12 microbatches, 10 ms ops; the latency of each link is drawn from N(30, 10) ms and drawn
again after U(50, 100), U(100, 200), U(200, 400) ms. The bursty trace: 8 ranks, 32 microbatches, 10 ms ops; each link
has a series of its own with median 13, mean 22.3 and 99th percentile 79.3 ms, as the paper reports of its hour; how
these follow one another in time it does not report: here they come in bursts, worst in the middle of the hour.

Delays here are latency: any number of messages may be under way. `direct` links hold 2 messages before the sender
stands still; delegated ones any number. Memory: no rank above the peak of frozen `zb` with warm-ups 2(S-i)-1.

Each run goes through the whole trace on its own:
    1f1b, zb         frozen, direct: what frameworks do
    zb delegated     frozen, all links delegated: PipeMorph-CPU
    zb dynamic       ready ops first, direct: no controller
    re-plan          the controller without dynamic dispatch, and without a memory cap, as PipeMorph
    ours             the controller, with all remedies, under the cap; it starts dynamic, on direct links
    ours, host       the same with host memory for as many activations again as a rank has microbatches

The clairvoyant schedule knows the delays of the iteration before it begins, and switches for nothing: the best of
many candidates, one of them from `ps.plan`, each simulated on just those delays, and improved by a local search over
warm-up counts. It starts at the same moments as ours, every `--every`-th iteration. It is the best that was found,
not a proven bound.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import penstock as ps
from penstock.control import Configuration, Controller, Job, Prices, rehearse, run_once
from penstock.control.configuration import peaks
from penstock.cost import LinkCondition, LinkConditions
from penstock.cost.over_time import Redrawn, Trace
from penstock.plan import adapted_warmups, initial_warmups, slow_link_schedule

OP = 10.0
INTERVALS = {"A": (50.0, 100.0), "B": (100.0, 200.0), "C": (200.0, 400.0)}
SHAPES = {"A": (4, 12), "B": (4, 12), "C": (4, 12), "bursty": (8, 32)}
QUANTILES = ((0.0, 1.0), (0.25, 6.5), (0.5, 13.0), (0.75, 30.0), (0.9, 56.5), (0.99, 79.3), (1.0, 110.0))
"""Shares and delays (ms) of the bursty trace; between them straight lines. Their mean is 22.3."""
SEARCH = 1.0
"""Seconds that `ps.plan` searches for each clairvoyant iteration, with the mean delays of that iteration."""
MORE_MEMORY = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Activations that each rank may hold above the cap, for the curve of throughput against memory."""
PAPER = {"bursty": "1.36 times ZB, 1.11 times 1F1B", "A": "up to 2.8 times the baselines over A, B and C"}


def trace_of(name: str, minutes: float, seed: int) -> LinkConditions:
    """The links' conditions over time."""
    num_ranks = SHAPES[name][0]
    links = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    if name in INTERVALS:
        shortest, longest = INTERVALS[name]
        drawn = Redrawn("normal", 30.0, 10.0, shortest, longest, seed)
        return LinkConditions({link: LinkCondition(drawn) for link in links})
    return LinkConditions({link: LinkCondition(bursty(minutes, f"{seed} {link}")) for link in links})


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


def start(name: str, num_ranks: int, num_microbatches: int, costs: ps.Costs, caps: Sequence[float]) -> Configuration:
    return Configuration(ps.build(name, num_ranks, num_microbatches), "frozen", (), caps)


def clairvoyant(job: Job, conditions: LinkConditions, at: float) -> float:
    """The shortest iteration (ms) found by a search that knows the delays to come."""
    num, num_microbatches = job.num_ranks, job.start.schedule.num_microbatches
    links = tuple((rank, rank + 1) for rank in range(num - 1))
    caps = job.caps(links)
    ideal = OP * (3 * num_microbatches + 2 * (num - 1))
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
    counts[initial_warmups(num, num_microbatches, caps, 1.0)] = None
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

    tried = {warmup: run(warmup) for warmup in counts if fits(warmup, caps)}
    rng = random.Random(0)
    for _ in range(8):
        now = min(tried, key=tried.__getitem__)
        neighbour = list(now)
        rank = rng.randrange(num)
        neighbour[rank] += rng.choice((-1, 1))
        warmup = tuple(neighbour)
        falling = all(a >= b for a, b in pairwise(warmup))
        if falling and warmup[-1] >= 1 and max(warmup) <= num_microbatches and fits(warmup, caps):
            tried.setdefault(warmup, math.inf)
            tried[warmup] = min(tried[warmup], run(warmup))
    planned = ps.plan(job.costs, num, num_microbatches, typical, memory_limit=list(caps), time_limit=SEARCH).schedule
    others = [
        run_once(job, Configuration(schedule, dispatch, links, caps), conditions, at).makespan
        for schedule in (job.start.schedule, planned)
        for dispatch in ("frozen", "dynamic")
    ]
    return min(*tried.values(), *others)


def fits(warmup: Sequence[int], caps: Sequence[float]) -> bool:
    return all(count <= cap for count, cap in zip(warmup, caps, strict=True))


def frozen_run(job: Job, configuration: Configuration, conditions: LinkConditions, until: float) -> dict[str, Any]:
    """A configuration that stays."""
    now, times = 0.0, []
    while now < until:
        times.append(run_once(job, configuration, conditions, now).makespan)
        now += times[-1]
    return {"iterations_per_minute": len(times) / sum(times) * 60e3, "mean_ms": fmean(times), "num": len(times)}


def controlled(job: Job, conditions: LinkConditions, until: float) -> tuple[dict[str, Any], Any]:
    controller = Controller(job)
    began = time.perf_counter()
    run = rehearse(controller, conditions, until=until)
    all_links = tuple((rank, rank + 1) for rank in range(job.num_ranks - 1))
    over = max(
        peak / cap - 1 for each in run.iterations for peak, cap in zip(each.peaks, job.caps(all_links), strict=True)
    )
    counts = controller.counts
    result = {
        "iterations_per_minute": run.iterations_per_minute,
        "mean_ms": run.ms / len(run.iterations),
        "num": len(run.iterations),
        "decisions": counts.decisions,
        "changes_suspected": counts.suspected,
        "changes_verified": counts.verified,
        "false_alarms": counts.false,
        "largest_peak_over_cap": 1 + over,
        "lost_ms": controller.lost,
        "paid_ms": controller.paid,
        "seconds": time.perf_counter() - began,
    }
    return result, run


def experiment(name: str, minutes: float, every: int, seed: int) -> dict[str, Any]:
    num_ranks, num_microbatches = SHAPES[name]
    costs = ps.Costs.uniform(num_ranks, OP, OP, OP)
    zb = ps.build("zb", num_ranks, num_microbatches)
    caps = tuple(peaks(zb, costs))
    conditions, until = trace_of(name, minutes, seed), minutes * 60e3
    job = Job(costs, Configuration(zb, "frozen", (), caps), prices=Prices())
    links = tuple((rank, rank + 1) for rank in range(num_ranks - 1))
    runs: dict[str, Any] = {}
    one = start("1f1b", num_ranks, num_microbatches, costs, [float(num_microbatches)] * num_ranks)
    runs["1f1b"] = frozen_run(job, one, conditions, until)
    runs["zb"] = frozen_run(job, job.start, conditions, until)
    runs["zb delegated"] = frozen_run(job, replace(job.start, delegated=links), conditions, until)
    as_paper = replace(job, dispatches=("frozen",), host_memory=float(num_microbatches))
    runs["re-plan"], _ = controlled(as_paper, conditions, until)
    dynamic = replace(job, start=replace(job.start, dispatch="dynamic"))
    with_host = replace(dynamic, host_memory=float(num_microbatches))
    runs["zb dynamic"] = frozen_run(job, dynamic.start, conditions, until)
    runs["ours"], ours = controlled(dynamic, conditions, until)
    runs["ours, host"], hosted = controlled(with_host, conditions, until)
    curve = {}
    for extra in MORE_MEMORY:
        roomy = replace(dynamic.start, delegated=links, caps=tuple(cap + extra for cap in caps))
        curve[f"{extra:g}"] = frozen_run(job, roomy, conditions, until)["iterations_per_minute"]
    gaps = {}
    for label, run, of in (
        ("ours", ours, job),
        ("ours, host", hosted, replace(job, host_memory=float(num_microbatches))),
    ):
        found = [each.ms / clairvoyant(of, conditions, each.start) for each in run.iterations[::every]]
        gaps[label] = {"mean": fmean(found) - 1, "largest": max(found) - 1, "num": len(found)}
    zb_rate = runs["zb"]["iterations_per_minute"]
    return {
        "trace": name,
        "minutes": minutes,
        "seed": seed,
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "no_delay_ms": ps.simulate(zb, costs).makespan,
        "delays": summary(conditions, until, links),
        "paper": PAPER.get(name, PAPER["A"]),
        "runs": runs,
        "dynamic_by_more_activations": curve,
        "times_zb": {label: run["iterations_per_minute"] / zb_rate for label, run in runs.items()},
        "over_clairvoyant": gaps,
    }


def summary(conditions: LinkConditions, until: float, links: Sequence[tuple[int, int]]) -> dict[str, float]:
    values = sorted(
        condition.latency.at(until * k / 2000, f"{link[0]}:{link[1]} latency")
        for link in links
        for k in range(2000)
        if (condition := conditions.named(*link)[1]) is not None
    )
    return {"median": median(values), "mean": fmean(values), "p99": values[int(0.99 * len(values))]}


def lines(found: dict[str, Any]) -> Iterator[str]:
    shown = {name: round(value, 1) for name, value in found["delays"].items()}
    yield f"trace {found['trace']}, {found['minutes']:g} minutes, delays {shown}; paper: {found['paper']}"
    for label, run in found["runs"].items():
        times = found["times_zb"][label]
        gap = found["over_clairvoyant"].get(label)
        more = f"   {gap['mean']:+.1%} of clairvoyant, {run['decisions']} decisions" if gap else ""
        yield f"  {label:14}{run['iterations_per_minute']:8.1f} iterations/min   {times:.2f} x zb{more}"
    zb = found["runs"]["zb"]["iterations_per_minute"]
    shown = ", ".join(f"+{extra}: {rate / zb:.2f}" for extra, rate in found["dynamic_by_more_activations"].items())
    yield f"  dynamic, delegated, by activations above the cap, x zb: {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=list(SHAPES), action="append", help="which; all where not given")
    parser.add_argument("--minutes", type=float, help="of trace; 5 for A, B and C, 60 for the bursty one")
    parser.add_argument("--every", type=int, default=10, help="iterations from one clairvoyant search to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("traces"), help="folder for results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.trace or SHAPES:
        minutes = given.minutes or (60.0 if name == "bursty" else 5.0)
        found = experiment(name, minutes, given.every, given.seed)
        (given.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print("\n".join(lines(found)), flush=True)


if __name__ == "__main__":
    main()
