"""Slowdown against memory: the last link of the 14B model 60 ms late, under caps from frozen `zb`'s down to 1F1B's.

    python -m experiments.pipemorph.memory                        a minute
    python -m experiments.pipemorph.memory --backend threads      three minutes

8 ranks, 32 microbatches, ops of 10 ms. Devices are alike: a cap of m lets every rank hold m activations. `zb` warms
up with 15 on its first rank, 1F1B 8. Slowdowns are multiples of `zb`'s 1030 ms without delay. The late link is
delegated.

    frozen         warm-ups by Algorithm 1 (15: `zb`'s 2(S-i)-1, 8: 1F1B's S-i), planned without delay
    re-planned     frozen, planned with the delay under the cap: the better of Algorithms 2 to 4's two rules
    dynamic        the first's schedule, any ready op under the cap
    ours           what the controller comes to under the cap; it starts dynamic, on direct links
    + in host      dynamic, with so many activations more in host memory: OFFLOAD and RELOAD ops, whose copies take as
                   long as a forward, keep each rank within the cap
    best           the shortest that any of the first four, or `ps.plan` in some seconds, found under the cap
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import penstock as ps
from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, Case
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import best_known, measured, simulated
from experiments.pipemorph.setups import CHAIN_8, DIRECT, late
from experiments.pipemorph.systems import Setting, settled
from penstock.control import Configuration, Job, run_once
from penstock.draw.chart import Axis, Figure, Level, Line, line_chart
from penstock.planning import initial_warmups, slow_link_schedule
from penstock.planning.joint.away import with_host_memory

MODEL = CHAIN_8
DELAY = 60.0
MEMORIES = tuple(range(15, 7, -1))
HOST = (2, 4, 8)
WAYS = ("frozen", "re-planned", "dynamic", "ours", *(f"+{more} in host memory" for more in HOST))
UNDELAYED = 1030.0


def rows(backend: Backend, memories: Sequence[int] = MEMORIES, search: float = 5.0) -> Iterator[Row]:
    """A row for each way and cap; `search` seconds for each best."""
    cases = [
        Case({"way": way, "memory": memory}, setting(way, memory), late({MODEL.last: DELAY}))
        for memory in memories
        for way in WAYS
    ]
    found = list(backend.run(cases))
    yield from found
    for memory in memories if backend.runs({"way": "best"}) else ():
        plan = ps.plan(
            MODEL.costs,
            MODEL.num_ranks,
            MODEL.num_microbatches,
            ps.Links({MODEL.last: DELAY}),
            memory_limit=float(memory),
            time_limit=search,
        )
        within = [simulated(find(found, way=way, memory=memory)) for way in WAYS[:4]]
        yield {
            "way": "best",
            "memory": memory,
            "simulated_ms": [min(plan.makespan, *within)],
            "measured_ms": [],
            "bound_ms": plan.lower_bound,
        }


def setting(way: str, memory: int) -> Setting:
    """What runs one way under a cap."""
    limit, links = (float(memory),) * MODEL.num_ranks, (MODEL.last,)
    counts = initial_warmups(MODEL.num_ranks, MODEL.num_microbatches, float(memory), 1.0)
    frozen = slow_link_schedule(MODEL.costs, MODEL.num_microbatches, warmup=counts, memory_limit=list(limit))
    start = Configuration(frozen, "frozen", links, limit)
    job = Job(MODEL.costs, start, transport=DIRECT)
    if way == "frozen":
        return Setting(job, start)
    if way == "ours":
        begin = Configuration(frozen, "dynamic", (), limit)
        return settled(Job(MODEL.costs, begin, transport=DIRECT), {MODEL.last: DELAY})
    if way == "re-planned":
        delays = ps.Links({MODEL.last: DELAY})
        planned = [
            slow_link_schedule(MODEL.costs, MODEL.num_microbatches, delays, memory_limit=list(limit), rule=rule)
            for rule in ("priority", "alternate")
        ]
        chosen = [Configuration(schedule, "frozen", links, limit) for schedule in planned]
        return Setting(job, min(chosen, key=lambda each: run_once(job, each, delays).makespan))
    if way == "dynamic":
        return Setting(job, replace(start, dispatch="dynamic"))
    more, costs, delays = float(way.partition(" ")[0]), MODEL.costs_with_copies, ps.Links({MODEL.last: DELAY})
    roomy = Configuration(frozen, "dynamic", links, tuple(cap + more for cap in limit))
    wanted = run_once(job, roomy, delays).executed()
    hosted = with_host_memory(wanted, costs, delays, limit, [more] * MODEL.num_ranks)
    schedules = [schedule for schedule in (hosted, frozen) if schedule is not None]
    tried = [Configuration(each, dispatch, links, limit) for each in schedules for dispatch in ("dynamic", "frozen")]
    with_copies = Job(costs, start, transport=DIRECT)
    return Setting(with_copies, min(tried, key=lambda each: run_once(with_copies, each, delays).makespan))


def slowdown(row: Row) -> str:
    found = measured(row)
    return f"{simulated(row) / UNDELAYED:.2f}" + ("" if found is None else f"/{found / UNDELAYED:.2f}")


def lines(rows: Sequence[Row]) -> Iterator[str]:
    memories = list(dict.fromkeys(row["memory"] for row in rows))
    yield f"slowdown against {UNDELAYED:g} ms by cap (activations a rank), simulated/measured"
    ways = (*WAYS, "best")
    yield from table(
        ["", *map(str, memories)],
        [[way, *(slowdown(find(rows, way=way, memory=m)) for m in memories)] for way in ways],
    )
    over = max(p / c for row in rows if "peaks" in row for p, c in zip(row["peaks"], row["caps"], strict=True))
    yield f"largest peak over its cap: {over:.2f}"


def chart(rows: Sequence[Row]) -> Figure:
    memories = sorted({row["memory"] for row in rows})
    lines = [
        Line(
            way,
            memories,
            [best_known(find(rows, way=way, memory=memory)) / UNDELAYED for memory in memories],
            stroke="dashed" if way == "best" else "solid",
        )
        for way in (*WAYS, "best")
        if way not in ("re-planned", "+2 in host memory")
    ]
    return line_chart(
        lines,
        title="Slowdown against memory, last link 60 ms late",
        note="8 ranks, 32 microbatches, ops of 10 ms; every rank may hold so much",
        x=Axis("activations that each rank may hold"),
        y=Axis("slowdown", low=1.0),
        levels=[Level(1.13, "paper 1.13, more memory")],
    )


if __name__ == "__main__":
    command("memory", __doc__, rows, lines, chart)
