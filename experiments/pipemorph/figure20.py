"""Figure 20: how near to the best the heuristic schedule is, what it takes to make, and how fine time steps must be.

    python -m experiments.pipemorph.figure20      seconds to a minute. Simulation alone.

Assumed, since the paper only says "3-8 stages and 6-32 microbatches with randomly generated profiles": the four
below, 5 profiles each; F, I and W of every stage drawn from U(8, 12), each link's delay from U(0, 10) ms. No memory
cap, as in the paper. The paper: below 1% from the optimum with 30 steps an op, in less than 100 ms.

    steps 2 to 30    Algorithm 4: decisions at multiples of a step alone, so an op and a message take whole steps
    events           ours: the same rules from event to event, without steps
    greedy           ours: what `ps.plan` has after its first pass

The best is what `ps.plan` finds in some seconds; `proved` says how far it can be from the optimum.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from statistics import fmean

import penstock as ps
from experiments.common.results import Row, table
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.command import command
from penstock.draw.chart import Axis, Figure, Line, line_chart
from penstock.planning import adapted_warmups, slow_link_schedule

SIZES = ((3, 6), (4, 12), (6, 24), (8, 32))
STEPS = (2, 5, 10, 20, 30)
PROFILES = 5
TARGET = 0.01


def rows(
    backend: Backend, sizes: Sequence[tuple[int, int]] = SIZES, profiles: int = PROFILES, search: float = 3.0
) -> Iterator[Row]:
    """A row for each size, profile and way; `search` seconds for each best."""
    ps.plan(ps.Costs.uniform(2), 2, 3, time_limit=0.1)  # compiles
    for num_stages, num_microbatches in sizes:
        for profile in range(profiles):
            costs, links = drawn(num_stages, profile)
            warmup = adapted_warmups(costs, links, num_microbatches)
            found: dict[str, tuple[float, float]] = {}
            for steps in (*STEPS, None):
                began = time.perf_counter()
                schedule = stepped(costs, num_microbatches, links, warmup, steps)
                took = time.perf_counter() - began
                name = "events" if steps is None else f"{steps} steps"
                found[name] = ps.simulate(schedule, costs, links=links).makespan, took
            began = time.perf_counter()
            plan = ps.plan(costs, num_stages, num_microbatches, links, time_limit=1e-3)
            found["greedy"] = plan.makespan, plan.seconds
            best = ps.plan(costs, num_stages, num_microbatches, links, time_limit=search)
            least = min(best.makespan, *(ms for ms, _ in found.values()))
            for way, (ms, seconds) in found.items():
                yield {
                    "stages": num_stages,
                    "microbatches": num_microbatches,
                    "profile": profile,
                    "way": way,
                    "simulated_ms": [ms],
                    "measured_ms": [],
                    "over_best": ms / least - 1,
                    "proved": max(0.0, least / best.lower_bound - 1),
                    "seconds": seconds,
                }


def drawn(num_stages: int, profile: int) -> tuple[ps.Costs, ps.Links]:
    """A profile: op times and delays in ms."""
    numbers = random.Random(f"{num_stages} {profile}")
    f, i, w = ([numbers.uniform(8, 12) for _ in range(num_stages)] for _ in range(3))
    return ps.Costs(f, i, w), ps.Links({(s, s + 1): numbers.uniform(0, 10) for s in range(num_stages - 1)})


def stepped(
    costs: ps.Costs, num_microbatches: int, links: ps.Links, warmup: Sequence[int], steps: int | None
) -> ps.Schedule:
    """The order that Algorithm 4 makes with so many time steps to the longest op: what takes a part of a step takes
    the whole, since decisions are made between steps alone. None: from event to event."""
    if steps is not None:
        step = max(*costs.f, *costs.i, *costs.w) / steps
        f, i, w = ([math.ceil(ms / step - 1e-9) * step for ms in row] for row in (costs.f, costs.i, costs.w))
        costs = ps.Costs(f, i, w)
        links = ps.Links({link: math.ceil(ms / step - 1e-9) * step for link, ms in links.delays.items()})
    return slow_link_schedule(costs, num_microbatches, links, warmup=warmup)


def ways(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["way"] for row in rows))


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "above the best (mean, worst of the profiles), and the time to make it (mean)"
    body = []
    for size in dict.fromkeys((row["stages"], row["microbatches"]) for row in rows):
        mine = [row for row in rows if (row["stages"], row["microbatches"]) == size]
        cells = []
        for way in ways(rows):
            over = [row["over_best"] for row in mine if row["way"] == way]
            took = fmean(row["seconds"] for row in mine if row["way"] == way)
            cells.append(f"{fmean(over):.1%} {max(over):.1%} {took * 1e3:.0f} ms")
        body.append([f"{size[0]} x {size[1]}", *cells, f"{max(row['proved'] for row in mine):.2%}"])
    yield from table(["", *ways(rows), "proved"], body)
    yield f"paper: below {TARGET:.0%} with 30 steps, in less than 100 ms; optimum by MILP in hours"


def chart(rows: Sequence[Row]) -> Figure:
    sizes = list(dict.fromkeys((row["stages"], row["microbatches"]) for row in rows))
    names = [way for way in ways(rows) if way.endswith("steps")]
    parts = []
    for size in sizes:
        mine = [row for row in rows if (row["stages"], row["microbatches"]) == size]
        over = [fmean(row["over_best"] for row in mine if row["way"] == way) for way in names]
        parts.append(
            Line(f"{size[0]} x {size[1]}", [float(name.split()[0]) for name in names], [100 * x for x in over])
        )
    return line_chart(
        parts,
        title="Figure 20: above the best, by time steps to an op",
        note="Algorithm 4 on random profiles, stages x microbatches; from event to event there are no steps",
        x=Axis("steps to the longest op"),
        y=Axis("above the best (%)"),
    )


if __name__ == "__main__":
    command("figure20", __doc__, rows, lines, chart, backends=("simulate",), seeds=range(PROFILES))
