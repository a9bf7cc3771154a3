"""Small planning problems drawn from a seed, and what the planner says of each beside the exact solver's answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import penstock as ps
from exact_solver import Instance, Solved, Task, solve, solve_tasks
from penstock.planning.bounds import (
    busy_bound,
    jackson_bound,
    least_work,
    quick_bound,
    ramp_bound,
    span_bound,
    work_bound,
)
from penstock.planning.joint.bounds import lower_bound, memory_bound, relaxed
from penstock.planning.joint.problem import pose_joint
from penstock.planning.options import Family, Limits, PlanRequest, family_of, in_turn, limits_of
from penstock.planning.planner import all_deals
from penstock.planning.problem import pose
from penstock.planning.search import span_of
from refutation import destructive_bound

ROUNDING = 1e-7
CLAIMED = 1e-4
"""Relative: nearer than the first, two numbers are the same; a gap below the second is a proof to `ps.plan`.

Instances are in whole numbers and their values below 1,000, so that two that differ do so by more.
"""

PLACEMENTS = {
    "one-to-one": [((0, 1),), ((0, 1, 2),)],
    "v": [((0, 1, 1, 0),), ((0, 1, 2, 2, 1, 0),)],
    "circular": [((0, 1, 0, 1),), ((0, 1, 2, 0, 1, 2),), ((0, 1, 0),)],
    "bidirectional": [((0, 1), (1, 0)), ((0, 1, 2), (2, 1, 0)), ((0, 1, 1, 0), (1, 0, 0, 1))],
    "table": [((0, 0, 1),), ((0, 1, 0, 0),), ((0, 1), (0, 1)), ((1, 0), (1, 1)), ((0, 1, 2, 0), (2, 1, 0, 2))],
}
_MOST_OPS = 40


@dataclass(frozen=True)
class Case:
    """One problem, as the solver takes it, with what `ps.plan` is given besides.

    Attributes:
        limit: "none", or the option that says the caps.
        share: of a forward's memory, what I frees.
        kept: of a forward's memory, what it keeps where it runs again; None where none does.
        unit, memory_unit: what one is to the planner, in ms and of memory: not always a whole number.
    """

    seed: int
    family: str
    limit: str
    instance: Instance
    share: float
    unit: float = 1.0
    memory_unit: float = 1.0
    kept: float | None = None

    @property
    def split(self) -> bool:
        return "W" in self.instance.time

    def arguments(self) -> dict[str, Any]:
        """What `ps.plan` is given."""
        one = self.instance
        nothing = (0,) * len(one.memory)
        rows = {kind.lower(): [ms * self.unit for ms in one.time.get(kind, nothing)] for kind in "FIW"}
        whole = {"b": [ms * self.unit for ms in one.time["B"]]} if "B" in one.time else {}
        held = [amount * self.memory_unit for amount in one.memory]
        offload: dict[str, Any] = {}
        if "O" in one.time:
            offload = {"offload": True if None in one.host else [(cap or 0) * self.memory_unit for cap in one.host]}
        costs = ps.Costs(**rows, **whole, activation=held, freed_by_input=self.share, kept_by_recompute=self.kept)
        if "R" in one.time and one.time["R"] != one.time["F"]:
            costs = costs.with_other({("R", s): ms * self.unit for s, ms in enumerate(one.time["R"])})
        if "O" in one.time:
            ways = {"O": "OFFLOAD", "L": "RELOAD"}
            costs = costs.with_other({(ways[k], s): ms * self.unit for k in ways for s, ms in enumerate(one.time[k])})
        capped = {} if self.limit == "none" else {self.limit: [(cap or 0) * self.memory_unit for cap in one.cap]}
        return {
            "costs": costs,
            "num_ranks": len(one.cap),
            "num_microbatches": one.num_microbatches,
            "links": ps.Links({pair: ms * self.unit for pair, ms in one.delay.items()}),
            "placement": ps.Placement(one.pipelines),
            "objective": one.objective,
            "split": None if {"W", "B"} <= set(one.time) else self.split,
            "deal": "any" if one.any_deal else "in turn",
            "seed": self.seed,
            **capped,
            **offload,
        }


def draw(seed: int, family: str | None = None, objective: str | None = None) -> Case:
    """The problem of a seed: a placement, times, delays, caps, whole or split backward, makespan or span."""
    source = random.Random(seed)
    family = family or source.choice(list(PLACEMENTS))
    pipelines = source.choice(PLACEMENTS[family])
    split = source.random() < 0.7
    num_stages, num_ranks = len(pipelines[0]), 1 + max(map(max, pipelines))
    most = max(2, _MOST_OPS // (num_stages * (3 if split else 2)))
    num_microbatches = source.randint(2, min(4, most))
    alike = source.random() < 0.2
    longest = source.choice([4, 12])

    def times() -> tuple[int, ...]:
        one = source.randint(1, longest)
        return tuple(one if alike else source.randint(1, longest) for _ in range(num_stages))

    time = {kind: times() for kind in ("FIW" if split else "FB")}
    late = source.random() < 0.6
    delay = {
        (a, b): source.randint(0, 2 * longest) if late and source.random() < 0.5 else 0
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b
    }
    limit = source.choice(["none", "max_in_flight", "max_in_flight", "memory_limit", "memory_limit"])
    memory, freed, share = (1,) * num_stages, (0,) * num_stages, 0.0
    if limit == "memory_limit":
        parts, of = source.choice([(0, 1), (1, 2), (1, 3), (2, 3), (1, 4), (1, 1)])
        memory = tuple(of * source.randint(1, 3) for _ in range(num_stages))
        freed, share = tuple(m * parts // of if split else 0 for m in memory), parts / of
    cap: list[int | None] = [None] * num_ranks
    for r in range(num_ranks if limit != "none" else 0):
        held = [sum(m for m, host in zip(memory, hosts, strict=True) if host == r) for hosts in pipelines]
        each = sum(held[m % len(pipelines)] for m in range(num_microbatches))
        cap[r] = max(1, source.randint(max(held), max(max(held), each)))
    goal = objective or source.choice(["makespan", "makespan", "span"])
    instance = Instance(pipelines, num_microbatches, time, delay, memory, freed, tuple(cap), goal)
    unit = source.choice([1.0, 1.0, 1.0, math.pi])
    memory_unit = source.choice([1.0, 1.0, math.sqrt(2)]) if limit == "memory_limit" else 1.0
    return Case(seed, family, limit, instance, share, unit, memory_unit)


OFFLOADED = ("offload", "offload and mixed", "offload and recompute", "deal and offload")
"""Those of the families in which activations may go to host memory: their cases have seeds of their own."""
FREE = ("recompute", "mixed", "recompute and mixed", "deal", "deal and all", *OFFLOADED)
"""What is decided besides the order, in the families of `draw_free`."""

_MOST_FREE_OPS = {"recompute": 27, "mixed": 27, "recompute and mixed": 21, "deal": 27, "deal and all": 18}
_MOST_FREE_OPS |= {"offload": 27, "offload and mixed": 21, "offload and recompute": 21, "deal and offload": 18}
_PARTS = 12
"""Of a forward's memory, so that the shares are whole numbers."""


def draw_free(seed: int, family: str | None = None) -> Case:
    """The problem of a seed in which more than the order is free."""
    source = random.Random(f"free {seed}")
    family = family or source.choice(FREE[: -len(OFFLOADED)])
    dealt = family.startswith("deal")
    places = "bidirectional" if dealt else source.choice(["one-to-one", "one-to-one", "v", "circular", "table"])
    pipelines = source.choice(PLACEMENTS[places] if not dealt else PLACEMENTS[places] + [((0, 1), (0, 1))])
    num_stages, num_ranks = len(pipelines[0]), 1 + max(map(max, pipelines))
    most = max(2, _MOST_FREE_OPS[family] // (num_stages * 3))
    num_microbatches = source.randint(2, max(2, min(5, most)))
    longest = source.choice([4, 12])
    alike = source.random() < 0.3
    mixed, again = "mixed" in family or "all" in family, "recompute" in family or "all" in family
    split = mixed or source.random() < 0.6

    def times() -> tuple[int, ...]:
        one = source.randint(1, longest)
        return tuple(one if alike else source.randint(1, longest) for _ in range(num_stages))

    time = {kind: times() for kind in ("FIW" if split else "FB")}
    if mixed:
        time["B"] = tuple(source.randint(1, i + w + 1) for i, w in zip(time["I"], time["W"], strict=True))
    if again:
        time["R"] = time["F"] if source.random() < 0.6 else times()
    late = source.random() < 0.4
    delay = {
        (a, b): source.randint(0, longest) if late and source.random() < 0.5 else 0
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b
    }
    away = "offload" in family
    limit = "memory_limit" if again else source.choice(["none", "max_in_flight", "memory_limit"][away:])
    memory, freed, share, kept = (1,) * num_stages, 0, 0.0, _PARTS
    if limit == "memory_limit":
        freed = source.choice([0, 3, 4, 6, 8, 12]) if split else 0
        kept = source.choice([0, 1, 1, 2, 3, 6]) if again else _PARTS
        alike_held = source.randint(1, 3)
        memory = tuple(_PARTS * (alike_held if alike else source.randint(1, 3)) for _ in range(num_stages))
        share = freed / _PARTS
    cap: list[int | None] = [None] * num_ranks
    for r in range(num_ranks if limit != "none" else 0):
        mine = [[m for m, host in zip(memory, hosts, strict=True) if host == r] for hosts in pipelines]
        needed = max(
            max((sum(held[:k]) * kept // _PARTS + held[k] for k in range(len(held))), default=1) for held in mine
        )
        all_held = max(sum(held) for held in mine) * num_microbatches
        if away and again:
            needed = max(needed, max(sum(held) for held in mine))
        # Tight, most often: what forms are for.
        cap[r] = source.randint(needed, max(needed, all_held if source.random() < 0.3 else all_held // 2))
    host: tuple[int | None, ...] = ()
    if away:
        ways = source.choice([2, longest])
        time |= {kind: tuple(source.randint(1, ways) for _ in range(num_stages)) for kind in "OL"}
        most_held = max(memory)
        host = tuple(source.randint(most_held, 3 * most_held) for _ in cap)
        if source.random() < 0.3:
            host = (None,) * num_ranks
    instance = Instance(
        pipelines, num_microbatches, time, delay, memory, [m * freed // _PARTS for m in memory], tuple(cap),
        kept=[m * kept // _PARTS for m in memory], host=host, any_deal=dealt,
    )  # fmt: skip
    unit = source.choice([1.0, 1.0, math.pi])
    memory_unit = source.choice([1.0, math.sqrt(2)]) if limit == "memory_limit" else 1.0
    return Case(seed, family, limit, instance, share, unit, memory_unit, kept / _PARTS if again else None)


@dataclass
class Verdict:
    """What was found for one case.

    Attributes:
        solved: by the exact solver.
        value, lower_bound: the plan's, in the case's unit; None where it ended in an error.
        proved: whether the planner claims the optimum.
        wrong: what does not hold, in words; empty where all does.
    """

    case: Case | GraphCase
    solved: Solved
    value: float | None = None
    lower_bound: float | None = None
    proved: bool = False
    wrong: list[str] = field(default_factory=list)


def judge(case: Case, time_limit: float = 0.3, seconds: float = 60.0) -> Verdict:
    """Plans a case, solves it, and compares: no bound above an achieved value, no value below a proved bound."""
    solved = solve(case.instance, seconds)
    verdict = Verdict(case, solved)
    if solved.value is not None:
        for name, bound in bounds(case).items():
            if bound > solved.value * (1 + ROUNDING):
                verdict.wrong.append(f"{name} bound {bound:g} is above the achieved {solved.value}")
    try:
        plan = ps.plan(**case.arguments(), time_limit=time_limit)
    except ps.ScheduleError as error:
        verdict.wrong.append(f"ps.plan: {error}")
        return verdict
    given = case.arguments()
    timeline = ps.simulate(plan.schedule, given["costs"], links=given["links"])
    counts = case.limit == "max_in_flight"
    for r, (peak, cap) in enumerate(zip(_held(timeline, case), case.instance.cap, strict=True)):
        if case.limit != "none" and cap is not None and peak > cap * case.memory_unit * (1 + ROUNDING):
            verdict.wrong.append(f"rank {r} holds {peak / case.memory_unit:g} of {cap}")
    for r, cap in enumerate(case.instance.host):
        peak = in_host_memory(timeline, r, [1.0] * len(case.instance.memory) if counts else given["costs"].activation)
        if cap is not None and peak > cap * case.memory_unit * (1 + ROUNDING):
            verdict.wrong.append(f"rank {r} has {peak / case.memory_unit:g} of {cap} in host memory")
    verdict.value, verdict.lower_bound = value, bound = plan.value / case.unit, plan.lower_bound / case.unit
    verdict.proved = plan.gap <= CLAIMED
    if bound > value * (1 + ROUNDING):
        verdict.wrong.append(f"the plan's bound {bound:g} is above its value {value:g}")
    if solved.value is not None and bound > solved.value * (1 + ROUNDING):
        verdict.wrong.append(f"the plan's bound {bound:g} is above the achieved {solved.value}")
    if verdict.proved and solved.proved and solved.value is not None and value > solved.value * (1 + CLAIMED):
        verdict.wrong.append(f"the plan's {value:g} is called proved, but {solved.value} is achieved")
    if value < solved.bound * (1 - ROUNDING):
        verdict.wrong.append(f"the plan's value {value:g} is below the solver's bound {solved.bound}")
    return verdict


def _held(timeline: ps.Timeline, case: Case) -> Sequence[float]:
    """The most that each rank holds, in the unit of the case's limit."""
    if case.limit != "max_in_flight":
        return timeline.peak_activations
    costs = replace(case.arguments()["costs"], activation=(), freed_by_input=0.0)
    return ps.simulate(timeline.schedule, costs, links=case.arguments()["links"]).peak_activations


def in_host_memory(timeline: ps.Timeline, rank: int, held: Sequence[float]) -> float:
    """The most that a rank has in host memory, of activations that weigh `held` on each stage, from when ops ran."""
    changes = []
    for timed in timeline.streams[rank]:
        if timed.op.kind == "OFFLOAD":
            changes.append((timed.start, 1, held[timed.op.stage]))
        elif timed.op.kind == "RELOAD":
            changes.append((timed.end, 0, -held[timed.op.stage]))
    there = most = 0.0
    for _, _, change in sorted(changes):
        there += change
        most = max(most, there)
    return most


def bounds(case: Case) -> dict[str, float]:
    """Each bound of the planner by itself, in the case's unit; of the makespan or of the span."""
    given = case.arguments()
    costs, placement, ranks = given["costs"], given["placement"], given["num_ranks"]
    number, one = given["num_microbatches"], case.instance
    family = family_of(PlanRequest(**given))
    limits = limits_of(
        costs, placement, ranks, given.get("max_in_flight"), given.get("memory_limit"), family.forms.split,
        costs.kept if family.forms.again else 1.0, given.get("offload"),
    )  # fmt: skip
    found: dict[str, float] = {}
    deals = list(all_deals(number, len(one.pipelines))) if one.any_deal else [in_turn(number, len(one.pipelines))]
    if one.any_deal:
        quick = quick_bound(np.array(deals), placement, ranks, costs.f, least_work(costs), given["links"])
        found["quick"] = float(quick.min())
    for counts in deals:
        made = _joint_bounds(case, counts, limits, family) if family.joint else _plain_bounds(case, counts, limits)
        # Of all deals the best counts: their least bound.
        found |= {name: min(value, found.get(name, math.inf)) for name, value in made.items()}
    return {name: value / case.unit for name, value in found.items()}


def _joint_bounds(case: Case, counts: tuple[int, ...], limits: Limits, family: Family) -> dict[str, float]:
    given = case.arguments()
    posed = pose_joint(
        given["costs"], given["placement"], given["num_ranks"], counts, given["links"], limits, family.forms
    )
    held = family.forms.again or family.forms.away
    return {"joint": lower_bound(posed), "memory": memory_bound(posed, relaxed(posed)) if held else 0.0}


def _plain_bounds(case: Case, counts: tuple[int, ...], limits: Limits) -> dict[str, float]:
    given = case.arguments()
    problem = pose(
        given["costs"], given["placement"], given["num_ranks"], given["num_microbatches"], given["links"],
        limits.held, limits.cap, case.split, counts,
    )  # fmt: skip
    if case.instance.objective == "span":
        span = span_of(problem)
        refuted = destructive_bound(span.bounded, 0.0, 4.0 * work_bound(span.bounded)) - span.shift
        return {"span": span_bound(problem), "destructive": refuted}
    made = (busy_bound, jackson_bound, work_bound, ramp_bound)
    found = {bound.__name__.removesuffix("_bound"): bound(problem) for bound in made}
    return found | {
        "ramp above work": ramp_bound(problem, found["work"]),
        "destructive": destructive_bound(problem, found["work"], 4.0 * found["work"]),
    }


GRAPHS = ("towers", "encoder", "skip", "any", "shared", "gather", "sizes", "shared and branched")
"""Families of `draw_graph`: towers that a last stage joins; an encoder whose output two stages take; edges that skip
stages; any edges; ends run by all ranks; towers with a gather between them; towers with microbatches of two sizes."""

_MOST_GRAPH_OPS = 36


@dataclass(frozen=True)
class GraphCase:
    """One problem of stages in a graph, or of microbatches that differ.

    Attributes:
        tasks, cap: as the exact solver takes it.
        arguments: what `ps.plan` is given.
    """

    seed: int
    family: str
    tasks: tuple[Task, ...]
    cap: tuple[int | None, ...]
    arguments: dict[str, Any]


def draw_graph(seed: int, family: str | None = None) -> GraphCase:
    """The problem of a seed: stages and edges, ranks, times, delays, caps, whole or split backward."""
    source = random.Random(f"graph {seed}")
    family = family or source.choice(GRAPHS)
    edges, num_stages = _edges(family, source)
    num_ranks = source.randint(2, 3)
    everyone = tuple(range(num_ranks))
    split = source.random() < 0.6
    shared: dict[int, tuple[int, ...]] = {}
    row = [source.randrange(num_ranks) for _ in range(num_stages)]
    if family.startswith("shared"):
        for stage in {0, num_stages - 1} if family == "shared" else {source.randrange(num_stages)}:
            shared[stage] = everyone if source.random() < 0.7 else tuple(source.sample(everyone, 2))
            row[stage] = shared[stage][0]
    hosts = [shared.get(s, (row[s],)) for s in range(num_stages)]
    each = num_stages * (3 if split else 2)
    counts = [max(2, min(4, _MOST_GRAPH_OPS // each))] * num_stages
    half = (num_stages - 1) // 2
    if family == "gather":
        counts = [2] * num_stages if split else [4] * num_stages
    if family == "sizes":
        counts = [2 if s < half else 4 for s in range(num_stages - 1)] + [2]
    longest = source.choice([4, 12])
    kinds = "FIW" if split else "FB"
    time = {kind: [source.randint(1, longest) for _ in range(num_stages)] for kind in kinds}
    late = source.random() < 0.5
    delay = {
        (a, b): source.randint(0, longest) if late and source.random() < 0.6 else 0
        for a in everyone
        for b in everyone
        if a != b
    }
    gathers = source.choice([1, 2]) if family == "gather" else 0
    gather_time = source.randint(1, longest)
    ends = (half - 1, num_stages - 1)
    meeting = tuple(dict.fromkeys(row[end] for end in ends))
    asynchronous = gathers > 0 and source.random() < 0.4
    needs: list[ps.schedule.Needs] = []
    registered: tuple[ps.schedule.Registered, ...] = ()
    if gathers:
        registered = (ps.schedule.Registered("GATHER", ends[0], counts[0] // gathers, meeting, asynchronous),)
        for end in ends:
            needs += [
                ps.schedule.Needs(("F", end), ("GATHER", ends[0]), num_before=gathers),
                ps.schedule.Needs(("GATHER", ends[0]), ("B", end), num_after=gathers),
            ]
    own_counts = tuple(counts) if len(set(counts)) > 1 else ()
    stages = ps.schedule.StageGraph(num_stages, edges, own_counts, registered, tuple(needs))
    limit = source.choice(["none", "max_in_flight", "memory_limit"])
    memory = [source.randint(1, 3) if limit == "memory_limit" else 1 for _ in range(num_stages)]
    memory = [2 * held for held in memory] if limit == "memory_limit" else memory
    freed = [held // 2 if split and limit == "memory_limit" else 0 for held in memory]
    tasks, place = _tasks(stages, counts, hosts, kinds, time, delay, memory, freed)
    for g in range(counts[0] // gathers if gathers else 0):
        group = range(g * gathers, (g + 1) * gathers)
        before = tuple(
            (
                place["F", end, m],
                # Ranks begin an asynchronous op together; to any other a rank's output comes over its link.
                0 if asynchronous and row[end] in meeting
                else max(0 if r == row[end] else delay[row[end], r] for r in meeting),
            )
            for end in ends
            for m in group
        )  # fmt: skip
        ranks = tuple(r + num_ranks for r in meeting) if asynchronous else meeting
        # On a stream, or a rank, one gather comes after the other.
        tasks.append(Task(ranks, gather_time, before))
        for end in ends:
            for m in group:
                k = place[kinds[1], end, m]
                tasks[k] = replace(tasks[k], needs=(*tasks[k].needs, (len(tasks) - 1, 0)))
    cap: list[int | None] = [None] * num_ranks
    if limit != "none":
        for r in everyone:
            # Room for one turn of everything, or more.
            of_rank = sum(memory[s] * counts[s] for s in range(num_stages) if r in hosts[s])
            alone = [max(1, gathers) * counts[s] // min(counts) for s in range(num_stages)]
            turn = sum(memory[s] * alone[s] for s in range(num_stages) if r in hosts[s])
            cap[r] = source.randint(max(1, turn), max(1, turn, of_rank))
    costs = ps.Costs(
        **{kind.lower(): [float(ms) for ms in time.get(kind, [0] * num_stages)] for kind in "FIW"},
        **({} if split else {"b": [float(ms) for ms in time["B"]]}),
        activation=[float(held) for held in memory],
        freed_by_input=0.5 if split and limit == "memory_limit" else 0.0,
    )
    if gathers:
        costs = costs.with_other({("GATHER", ends[0]): (float(gather_time), 0.0)})
    arguments = {
        "costs": costs,
        "num_ranks": num_ranks,
        "num_microbatches": max(counts),
        "links": ps.Links({pair: float(ms) for pair, ms in delay.items()}),
        "placement": ps.Placement((tuple(row),), tuple(shared.items())),
        "stages": stages,
        "split": split,
        "seed": seed,
        **({} if limit == "none" else {limit: list(cap)}),
    }
    rows = (*cap, *[None] * (num_ranks if asynchronous else 0))
    return GraphCase(seed, family, tuple(tasks), rows, arguments)


def _edges(family: str, source: random.Random) -> tuple[tuple[tuple[int, int], ...], int]:
    """The edges of a family, and how many stages there are."""
    if family == "gather":
        return ((0, 1), (2, 3)), 4
    if family in ("towers", "sizes"):
        return ((0, 1), (1, 4), (2, 3), (3, 4)), 5
    if family == "encoder":
        return ((0, 1), (1, 2), (0, 3), (2, 3)), 4
    if family == "skip":
        return ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3)), 4
    if family == "shared":
        num_stages = source.randint(3, 4)
        return tuple((s, s + 1) for s in range(num_stages - 1)), num_stages
    num_stages = source.randint(3, 5)
    pairs = [(a, b) for a in range(num_stages) for b in range(a + 1, num_stages) if source.random() < 0.5]
    return tuple(pairs), num_stages


def _tasks(
    stages: ps.schedule.StageGraph,
    counts: list[int],
    hosts: list[tuple[int, ...]],
    kinds: str,
    time: dict[str, list[int]],
    delay: dict[tuple[int, int], int],
    memory: list[int],
    freed: list[int],
) -> tuple[list[Task], dict[tuple[str, int, int], int]]:
    """Forwards and backwards as tasks, and the place of each (kind, stage, microbatch)."""
    ops = [(kind, s, m) for s, count in enumerate(counts) for kind in kinds for m in range(count)]
    place = {op: k for k, op in enumerate(ops)}
    back = kinds[1]

    def way(a: int, b: int) -> int:
        return max(0 if r in hosts[a] else delay[hosts[a][0], r] for r in hosts[b])

    def same(s: int, m: int, other: int) -> list[int]:
        """The microbatches of another stage that share samples with one of this, all samples in one line."""
        first, end = m * counts[other], (m + 1) * counts[other]
        return [n for n in range(counts[other]) if n * counts[s] < end and (n + 1) * counts[s] > first]

    tasks = []
    for kind, s, m in ops:
        needs = []
        if kind == "F":
            needs = [(place["F", a, n], way(a, s)) for a, b in stages.edges if b == s for n in same(s, m, a)]
        elif kind == back:
            needs = [(place["F", s, m], 0)]
            needs += [(place[back, b, n], way(b, s)) for a, b in stages.edges if a == s for n in same(s, m, b)]
        else:
            needs = [(place["I", s, m], 0)]
        gives = {"F": 0, "B": memory[s], "I": freed[s], "W": memory[s] - freed[s]}[kind]
        tasks.append(Task(hosts[s], time[kind][s], tuple(needs), memory[s] if kind == "F" else 0, gives))
    return tasks, place


def judge_graph(
    case: GraphCase,
    time_limit: float = 0.3,
    seconds: float = 60.0,
    above_caps: Callable[[GraphCase, ps.Timeline], list[str]] | None = None,
) -> Verdict:
    """Plans a problem of a graph, solves it, and compares; what does not hold, in words."""
    solved = solve_tasks(case.tasks, case.cap, seconds)
    verdict = Verdict(case, solved)
    try:
        plan = ps.plan(**case.arguments, time_limit=time_limit)
    except ps.ScheduleError as error:
        verdict.wrong.append(f"ps.plan: {error}")
        return verdict
    verdict.value, verdict.lower_bound = value, bound = plan.value, plan.lower_bound
    verdict.proved = plan.gap <= CLAIMED
    ps.check(plan.schedule)
    if above_caps is not None:
        verdict.wrong += above_caps(case, plan.timeline)
    if solved.value is not None and bound > solved.value * (1 + ROUNDING):
        verdict.wrong.append(f"the plan's bound {bound:g} is above the achieved {solved.value}")
    if value < solved.bound * (1 - ROUNDING):
        verdict.wrong.append(f"the plan's value {value:g} is below the solver's bound {solved.bound}")
    if verdict.proved and solved.proved and solved.value is not None and value > solved.value * (1 + CLAIMED):
        verdict.wrong.append(f"the plan's {value:g} is called proved, but {solved.value} is achieved")
    return verdict


UNEVEN = tuple(PLACEMENTS)
"""Families of `draw_uneven`: where the stages lie."""

_MOST_UNEVEN_OPS = 36


def draw_uneven(seed: int, family: str | None = None) -> GraphCase:
    """The problem of a seed in which each op takes a time of its own, and each forward keeps memory of its own.

    Microbatch m is dealt to pipeline m mod P. The solver takes each op as a task and knows no order of microbatches.
    """
    source = random.Random(f"uneven {seed}")
    family = family or source.choice(UNEVEN)
    pipelines = source.choice(PLACEMENTS[family])
    num_stages, num_ranks = len(pipelines[0]), 1 + max(map(max, pipelines))
    kinds = "FIW" if source.random() < 0.6 else "FB"
    num = source.randint(2, max(2, min(5, _MOST_UNEVEN_OPS // (num_stages * len(kinds)))))
    longest = source.choice([4, 12])
    of_length = source.random() < 0.3  # one length a microbatch, for all its ops
    lengths = [source.randint(1, longest) for _ in range(num)]

    def table(most: int) -> list[list[int]]:
        return [[length if of_length else source.randint(1, most) for length in lengths] for _ in range(num_stages)]

    time = {kind: table(longest) for kind in kinds}
    late = source.random() < 0.5
    delay = {
        (a, b): source.randint(0, longest) if late and source.random() < 0.6 else 0
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b
    }
    limit = source.choice(["none", "max_in_flight", "memory_limit", "memory_limit"])
    halves = kinds == "FIW" and limit == "memory_limit" and source.random() < 0.5
    memory = [[2 * held for held in row] for row in table(4)]
    if limit != "memory_limit":
        memory = [[1] * num] * num_stages
    ops = [(kind, s, m) for kind in kinds for s in range(num_stages) for m in range(num)]
    place = {op: k for k, op in enumerate(ops)}
    hosts = [pipelines[m % len(pipelines)] for m in range(num)]
    tasks = []
    for kind, s, m in ops:
        other = s - 1 if kind == "F" else s + 1
        needs = [] if kind == "F" else [(place["I" if kind == "W" else "F", s, m], 0)]
        if kind != "W" and 0 <= other < num_stages:
            needs.append((place[kind, other, m], delay.get((hosts[m][other], hosts[m][s]), 0)))
        held = memory[s][m]
        by_input = held // 2 if halves else 0
        gives = {"F": 0, "B": held, "I": by_input, "W": held - by_input}[kind]
        tasks.append(Task((hosts[m][s],), time[kind][s][m], tuple(needs), held if kind == "F" else 0, gives))
    cap: list[int | None] = [None] * num_ranks
    for r in range(num_ranks if limit != "none" else 0):
        # Room for one microbatch as heavy as the heaviest is on each stage, or for more.
        alone = max(sum(max(memory[s]) for s, host in enumerate(row) if host == r) for row in pipelines)
        whole = sum(memory[s][m] for m in range(num) for s, host in enumerate(hosts[m]) if host == r)
        cap[r] = source.randint(max(1, alone), max(1, alone, whole))
    message = {kind: [[source.uniform(0.1, 3) for _ in range(num)] for _ in range(num_stages)] for kind in "FB"}
    ones, none = [1.0] * num_stages, [0.0] * num_stages
    costs = ps.Costs(
        f=ones,
        i=ones if "I" in kinds else none,
        w=ones if "W" in kinds else none,
        **({"b": ones} if "B" in kinds else {}),
        activation=ones,
        freed_by_input=0.5 if halves else 0.0,
        uneven={"time": time, "activation": memory, "message": message},
    )
    arguments = {
        "costs": costs,
        "num_ranks": num_ranks,
        "num_microbatches": num,
        "links": ps.Links({pair: float(ms) for pair, ms in delay.items()}),
        "placement": ps.Placement(pipelines),
        "split": "W" in kinds,
        "dispatch": source.choice(["frozen", "frozen", "frozen", "hinted", "dynamic"]),
        "seed": seed,
        **({} if limit == "none" else {limit: list(cap)}),
    }
    return GraphCase(seed, family, tuple(tasks), tuple(cap), arguments)


def judge_uneven(case: GraphCase, time_limit: float = 0.3, seconds: float = 60.0) -> Verdict:
    """As `judge_graph`; no rank may hold more than its cap either, as ops ran in the plan's timeline."""
    return judge_graph(case, time_limit, seconds, _above_caps)


def _above_caps(case: GraphCase, timeline: ps.Timeline) -> list[str]:
    """The ranks that hold more than their caps, from when each op ran, in words."""
    kinds = ("F", "I", "W") if case.arguments["split"] else ("F", "B")
    num_stages, num = case.arguments["costs"].num_stages, case.arguments["num_microbatches"]
    tasks = dict(
        zip(((k, s, m) for k in kinds for s in range(num_stages) for m in range(num)), case.tasks, strict=True)
    )
    wrong = []
    for r, (row, cap) in enumerate(zip(timeline.rows, case.cap, strict=True)):
        changes = []
        for timed in row:
            task = tasks[timed.op.kind, timed.op.stage, timed.op.microbatch]
            changes += [(timed.start, 1, task.takes), (timed.end, 0, -task.gives)]
        held = most = 0
        for _, _, change in sorted(changes):
            held += change
            most = max(most, held)
        if cap is not None and most > cap:
            wrong.append(f"rank {r} holds {most} of {cap}")
    return wrong
