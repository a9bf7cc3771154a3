"""The process of one checkout in the comparison of two: answers what pair.py asks, a line of JSON for each question.

    PYTHONPATH=src:.:tests .venv/bin/python .../benchmarks/limits/answers.py       in the folder of either checkout

It asks the checkout's own benchmarks. What the two commits name differently is in this file alone.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

import penstock as ps
from penstock.dispatch import Dispatch, Dispatcher, FrozenDispatcher
from penstock.engine import list_by_values
from penstock.engine.compiled import compiled
from penstock.planning.problem import pose
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

Lister = getattr(import_module("penstock.dispatch.queues"), "Lister", None)
Lister = Lister or import_module("penstock.simulation.lister").Lister  # the earlier commit
SOLVER_SECONDS = 20.0
LIBRARY = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "chimera", "dualpipe", "v-half")
PLACEMENTS = (
    [[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]], [[0, 1, 1, 0]], [[0, 1, 2, 2, 1, 0]], [[0, 1, 0, 1]], [[0, 1, 2, 0, 1, 2]],
    [[0, 1], [1, 0]], [[0, 1, 2], [2, 1, 0]], [[0, 1, 1, 0], [1, 0, 0, 1]], [[0, 0, 1]], [[1, 0], [1, 1]],
)  # fmt: skip
TRAVERSALS = ("breadth_first", "depth_first", "earliest_first", "by_microbatch")


def proof(kind: str, seed: int, seconds: float, known: list[Any] | None) -> dict[str, Any]:
    """A case of benchmarks/proofs as it is judged there; `known` is the exact solver's answer, None to ask it now."""
    proofs, cases, exact = map(import_module, ("benchmarks.proofs.run", "proof_cases", "exact_solver"))
    asked = (lambda *_: exact.Solved(*known, None)) if known else None
    cases.solve, cases.solve_tasks = asked or exact.solve, asked or exact.solve_tasks
    case = proofs._case_of(kind, seed)
    given = case.instance if hasattr(case, "instance") else (case.tasks, case.cap)
    line = {"value": None, "bound": None, "proved": False, "solved": known or [None, 0, False], "wrong": []}
    try:
        line |= proofs._judged((seed, proofs.Settings(kind, seconds, SOLVER_SECONDS, "")))
    except Exception as error:
        line["wrong"].append(f"{type(error).__name__}: {error}")
    return {name: line[name] for name in ("value", "bound", "proved", "solved", "wrong")} | {"case": digest(given)}


def refused(seed: int, known: bool | None) -> dict[str, Any]:
    """Whether `ps.plan` refuses a plain case under caps that may be too low, and whether there is no order."""
    cases, exact = import_module("proof_cases"), import_module("exact_solver")
    case, draw = cases.draw(seed), random.Random(f"caps {seed}")
    held = np.zeros(
        (len(case.instance.pipelines), len(case.instance.cap)), int
    )  # by one microbatch at its last stage
    for pipeline, hosts in enumerate(case.instance.pipelines):
        np.add.at(held[pipeline], list(hosts), case.instance.memory)
    caps = tuple(
        draw.randint(max(1, need // 2), need) if draw.random() < 0.4 else need for need in held.max(0).tolist()
    )
    limit = "max_in_flight" if case.limit == "none" else case.limit
    case = replace(case, limit=limit, instance=replace(case.instance, cap=caps, objective="makespan"))
    if known is None:
        solved = exact.solve(case.instance, SOLVER_SECONDS)
        known = solved.value is None if solved.proved or solved.value is not None else None
    try:
        ps.plan(**case.arguments(), time_limit=0.05)
    except ps.ScheduleError as error:
        return {"refused": True, "rule": error.rule, "impossible": known}
    return {"refused": False, "rule": None, "impossible": known}


def dispatched(name: str, num_ranks: int, num_microbatches: int, kind: str, text: str) -> dict[str, Any]:
    """A schedule of benchmarks/dispatch, or the one of a text, and its makespans under all policies."""
    run = import_module("benchmarks.dispatch.run")
    schedule = ps.parse(text) if text else run.problem(name, num_ranks, num_microbatches, kind).schedule
    costs = run._costs(kind, name, num_ranks, schedule.num_stages)
    given = run.Problem(name, num_ranks, num_microbatches, kind, schedule, costs)
    return {"schedule": str(schedule), "rows": [list(row) for row in run.measured(given)]}


def late_plan(case: str) -> dict[str, Any]:
    """The plans of a case of benchmarks/late_link, and the makespans of every way to run them."""
    run = import_module("benchmarks.late_link.run")
    found = run.planned([case])[case]
    texts = [str(ps.load(run.path_of(case, delayed))) for delayed in (False, True)]
    return {**found, "schedules": texts, "ways": late_ways(case, found["memory_limit"], texts)}


def late_ways(case: str, held: list[float], texts: list[str]) -> dict[str, float]:
    """Simulated makespans (ms) of a case's ways to run two schedules, made without the delay and for it."""
    run = import_module("benchmarks.late_link.run")
    found = {}
    for way, order, dispatch in run.WAYS:
        schedule, links = ps.parse(texts[order == "planned for it"]), ps.Links() if way == "undelayed" else run.LATE
        cap = None if dispatch == "frozen" else held
        timeline = ps.simulate(schedule, run.costs_of(case), links=links, dispatch=dispatch, memory_limit=cap)
        found[way] = timeline.makespan
    return found


def late_measured(case: str, held: list[float]) -> dict[str, Any]:
    """The ways of a case on emulated devices, over the schedules that `late_plan` has left in this checkout."""
    found: dict[str, Any] = import_module("benchmarks.late_link.run").emulated({case: {"memory_limit": held}}, [case])
    return found[case]


def large(num_ranks: int, num_microbatches: int) -> dict[str, float]:
    """Processor seconds of each phase of benchmarks/engine in a fresh process, and its peak memory."""
    timed = import_module("benchmarks.engine.run").ONE.replace("perf_counter", "process_time")
    words = [sys.executable, "-c", timed, "zb-h1"]
    said = subprocess.run([*words, f"{num_ranks}", f"{num_microbatches}", "1"], check=True, stdout=subprocess.PIPE)
    found = json.loads(said.stdout)
    return {**found["seconds"][0], "peak_mib": found["peak_mib"]}


def decided(first: int, end: int) -> list[dict[str, dict[str, str]]]:
    """Of each problem of these seeds, by decider and form, the digest of what it decides."""
    return [decisions(random.Random(f"deciders {seed}")) for seed in range(first, end)]


def decisions(draw: random.Random) -> dict[str, dict[str, str]]:
    pipelines = draw.choice(PLACEMENTS)
    num_ranks, num_stages, num = 1 + max(map(max, pipelines)), len(pipelines[0]), draw.randint(2, 8)
    whole = draw.random() < 0.5  # then many things happen at one moment, and ties count
    times = [[drawn(draw, whole) for _ in range(8)] for _ in "fiw"]
    freed, split = draw.choice([0.0, 0.5, 1 / 3]), draw.random() < 0.6
    late = [(a, b) for a in range(4) for b in range(a) if draw.random() < 0.4]  # which differ by direction
    delay = {ends: drawn(draw, whole) for a, b in late for ends in ((a, b), (b, a))}
    near = {ends: ms for ends, ms in delay.items() if max(ends) < num_ranks}
    costs = ps.Costs(*(row[:num_stages] for row in times), freed_by_input=freed)
    placement = ps.Placement(tuple(map(tuple, pipelines)))
    program = ps.Program(placement, num, rules(draw), split=split, costs=costs, links=ps.Links(near))
    cap = draw.choice([float("inf"), 2.0, 3.0]) * num_stages * len(pipelines) / num_ranks
    problem = pose(
        costs, placement, num_ranks, num, ps.Links(near), [(1.0, freed)] * num_stages, [cap] * num_ranks, split
    )
    found = {"list by rules": by_rules(program), "list by values": by_values(draw, problem.queues, whole)}
    name, num_ranks, num = draw.choice(LIBRARY), draw.choice([2, 4]), draw.choice([4, 8, 12])
    try:
        schedule = program.build() if draw.random() < 0.5 else None
    except ps.ScheduleError:
        schedule = None
    schedule = schedule or ps.build(name, num_ranks, max(num, 2 * num_ranks))
    costs = ps.Costs(*(row[: schedule.num_stages] for row in times), freed_by_input=freed)
    return found | by_policy(schedule, costs, delay, draw.choice([1.0, 1.25, 2.0]))


def drawn(draw: random.Random, whole: bool) -> float:
    return float(draw.randint(1, 6)) if whole else draw.uniform(1, 6)


def rules(draw: random.Random) -> ps.Rules:
    made = []
    for name in draw.choices(TRAVERSALS, k=2):
        interval = [draw.choice([None, 1, 2])] if name in ("breadth_first", "depth_first") else []
        made.append(getattr(ps.program, name)(*interval))
    return ps.Rules(
        kinds=draw.choice(["backward-first", "forward-first", "interleaved"]),
        units=(draw.randint(1, 3), draw.randint(1, 3)), strict=draw.random() < 0.3,
        patience=draw.choice([0.0, 0.0, 2.0]), forward=made[0], backward=made[1],
        warmup=draw.choice([None, None, 1, 2]), max_in_flight=draw.choice([None, 2, 3, 4]),
    )  # fmt: skip


def by_rules(program: ps.Program) -> dict[str, str]:
    """List scheduling by rules: rows, or the rule by which caps are refused."""
    found = {}
    for form in ("C", "Python"):
        try:
            graph = program.queues()
            listed = Lister(graph, compile=form == "C").list_by_rules(program.tables(graph))
            found[form] = digest([listed.copy_rows(), float(listed.makespan)])
        except ps.ScheduleError as error:
            found[form] = f"refused: {error.rule}"
    return found


def by_values(draw: random.Random, network: Any, whole: bool) -> dict[str, str]:
    """List scheduling by values: the rows, when each op starts, and the makespan."""
    values = [draw.randint(0, 9) + (0.0 if whole else draw.random()) for _ in range(network.num_ops)]
    wait, turned, in_turn = draw.choice([0.0, 0.0, 3.0]), draw.random() < 0.3, draw.random() < 0.3
    network, found = network.turned() if turned else network, {}
    for form, module in (("C", compiled(list_by_values)), ("Python", list_by_values)):
        space = list_by_values.ListSpace.of(network)
        space.values[:], space.wait[:] = values, wait
        made = float(module.list_ops(network, space, turned, in_turn))
        found[form] = digest([made, *([space.row.tolist(), space.start.tolist()] if made >= 0 else [])])
    return found


def by_policy(
    schedule: ps.Schedule, costs: ps.Costs, delay: dict[tuple[int, int], float], room: float
) -> dict[str, dict[str, str]]:
    """The simulator's order and start times under each policy, and those of the ranks' dispatchers over one clock."""
    links = ps.Links({ends: ms for ends, ms in delay.items() if max(ends) < schedule.num_ranks})
    found = {}
    for policy in ("frozen", "hinted", "dynamic", "hinted:0.5"):
        forms = found[policy] = {}
        for form in ("C", "Python"):
            runner = Runner(costs, compile=form == "C")
            order = runner.order(schedule)
            caps = [room * peak for peak in order.peaks]
            ran = runner.run(order, links, dispatch=policy, transport=Decoupled(), caps=caps)
            start = ran.start_time if hasattr(ran, "start_time") else ran.arrays["start_time"]
            forms[form] = digest([str(ran.executed().order), np.asarray(start).tolist()])
        if policy != "hinted:0.5":  # ranks wait for what is nearly due in simulations alone
            forms["runtime"] = digest(by_dispatchers(order, Dispatch(policy), caps, delay))
    return found


def by_dispatchers(
    order: Any, dispatch: Dispatch, caps: list[float], delay: dict[tuple[int, int], float]
) -> list[Any]:
    """The rows and start times if each rank asks its dispatcher whenever an op has ended or a message has come."""
    graph, change, duration = order.graph, order.change.tolist(), order.duration.tolist()
    ranks = [
        FrozenDispatcher(graph, r, change)
        if dispatch is Dispatch.FROZEN
        else Dispatcher(graph, r, dispatch, change, cap)
        for r, cap in enumerate(caps)
    ]
    start, time, running = [0.0] * graph.num_ops, 0.0, [False] * len(ranks)
    rows: list[list[Any]] = [[] for _ in ranks]
    events: list[tuple[float, int, int]] = []  # when, an op, and the one that its message is for; -1 where it ends
    while True:
        for r, rank in enumerate(ranks):
            if not running[r] and (op := rank.next()) is not None:
                start[op], running[r] = time, True
                rows[r].append(graph.ops[op])
                heapq.heappush(events, (time + duration[op], op, -1))
        if not events:
            return [str(tuple(map(tuple, rows))), start]
        time = events[0][0]
        while events and events[0][0] == time:
            _, op, target = heapq.heappop(events)
            if target >= 0:
                ranks[graph.rank[target]].arrive(target)
                continue
            here = graph.rank[op]
            ranks[here].finish(op)
            running[here] = False
            for to in graph.successors(op):
                if graph.rank[to] != here:
                    heapq.heappush(events, (time + delay.get((here, graph.rank[to]), 0.0), op, to))


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, *given = json.loads(line)
        out.write(json.dumps(globals()[name](*given)) + "\n")
        out.flush()
