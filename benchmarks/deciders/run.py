"""The engine's deciders beside those that it replaced: the orders that both make of random problems.

    git worktree add ../before 59f8f88
    python benchmarks/deciders/run.py ../before --out benchmarks/deciders/results.json
    python benchmarks/deciders/run.py ../before --cases 20          a quick look, nothing kept

BEFORE is the path of a checkout of the last commit before the engine. None of its code is here: this file runs there
too, as a process of its own with that checkout's package, and writes a line per case. The protocol is in README.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from penstock.dispatch import Dispatch, lower
from penstock.dispatch.dispatcher import Dispatcher

HERE = Path(__file__).resolve()
NOW = HERE.parents[2]
SHOWN = 20
"""Of how many cases that differ both answers are kept whole."""

LIBRARY = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "chimera", "dualpipe", "v-half")
TRAVERSALS = ("breadth_first", "depth_first", "earliest_first", "by_microbatch")
PLACEMENTS = {
    "one-to-one": [[[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]]],
    "v": [[[0, 1, 1, 0]], [[0, 1, 2, 2, 1, 0]]],
    "circular": [[[0, 1, 0, 1]], [[0, 1, 2, 0, 1, 2]]],
    "bidirectional": [[[0, 1], [1, 0]], [[0, 1, 2], [2, 1, 0]], [[0, 1, 1, 0], [1, 0, 0, 1]]],
    "table": [[[0, 0, 1]], [[0, 1, 0, 0]], [[1, 0], [1, 1]]],
}


def moved(old: str, new: str) -> Any:
    """The module by the name that it has in the checkout whose package this is."""
    try:
        return importlib.import_module(f"penstock.{new}")
    except ImportError:
        return importlib.import_module(f"penstock.{old}")


memory = moved("simulate.memory", "simulation.memory")
listing = moved("plan.listing", "engine.list_by_values")
posing = moved("plan.problem", "planning.problem")


def drawn(seed: int) -> dict[str, Any]:
    """The problem of a seed, in numbers and names alone."""
    source = random.Random(f"deciders {seed}")
    family = source.choice(list(PLACEMENTS))
    pipelines = source.choice(PLACEMENTS[family])
    whole = source.random() < 0.5  # then many things happen at one moment, and ties count

    def times(count: int) -> list[float]:
        return [float(source.randint(1, 6)) if whole else source.uniform(1, 6) for _ in range(count)]

    num_stages, num_ranks = len(pipelines[0]), 1 + max(map(max, pipelines))
    num = source.randint(2, 8)
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    freed = source.choice([0.0, 0.5, 1 / 3])
    return {
        "family": family,
        "pipelines": pipelines,
        "num_microbatches": num,
        "split": source.random() < 0.6,
        "times": [times(num_stages) for _ in "fiw"],
        "freed": freed,
        "late": [[a, b, ms] for (a, b), ms in zip(pairs, times(len(pairs)), strict=True) if source.random() < 0.3],
        "library": source.choice(LIBRARY),
        "library_counts": [source.choice([2, 4]), source.choice([4, 8, 12])],
        "room": source.choice([None, None, 1.25, 2.0]),
        "rules": {
            "kinds": source.choice(["backward-first", "forward-first", "interleaved"]),
            "units": [source.randint(1, 3), source.randint(1, 3)],
            "strict": source.random() < 0.3,
            "patience": source.choice([0.0, 0.0, 2.0]),
            "traversals": [source.choice(TRAVERSALS) for _ in "fb"],
            "interval": source.choice([None, None, 1, 2]),
            "warmup": source.choice([None, None, 1, 2]),
            "max_in_flight": source.choice([None, 2, 3, 4]),
        },
        "values": [source.randint(0, 9) + (0.0 if whole else source.random()) for _ in range(300)],
        "wait": [source.choice([0.0, 0.0, 3.0]) for _ in range(num_ranks)],
        "cap": source.choice([float("inf"), 2.0, 3.0]) * len(pipelines[0]) * len(pipelines) / num_ranks,
        "turned": source.random() < 0.3,
    }  # fmt: skip


def costs_of(case: dict[str, Any], num_stages: int) -> ps.Costs:
    """The times of the case, over so many stages."""
    f, i, w = ([row[s % len(row)] for s in range(num_stages)] for row in case["times"])
    return ps.Costs(f, i, w, freed_by_input=case["freed"])


def links_of(case: dict[str, Any], num_ranks: int) -> ps.Links:
    return ps.Links({(a, b): ms for a, b, ms in case["late"] if max(a, b) < num_ranks})


def given_schedule(seed: int) -> str:
    """The schedule that both dispatch: one of the library's, as this checkout builds it."""
    case = drawn(seed)
    num_ranks, num_microbatches = case["library_counts"]
    return built(case["library"], num_ranks, max(num_microbatches, 2 * num_ranks))


@cache
def built(name: str, num_ranks: int, num_microbatches: int) -> str:
    return str(ps.build(name, num_ranks, num_microbatches))


@cache
def read(text: str) -> ps.Schedule:
    return ps.parse(text)


def by_rules(case: dict[str, Any]) -> str:
    """What list scheduling by rules makes."""
    of = case["rules"]
    made = []
    for name in of["traversals"]:
        with_interval = name in ("breadth_first", "depth_first")
        made.append(getattr(ps, name)(of["interval"]) if with_interval else getattr(ps.program, name)())
    rules = ps.Rules(
        kinds=of["kinds"], units=tuple(of["units"]), strict=of["strict"], patience=of["patience"], forward=made[0],
        backward=made[1], warmup=of["warmup"], max_in_flight=of["max_in_flight"],
    )  # fmt: skip
    placement = ps.Placement(tuple(map(tuple, case["pipelines"])))
    num_ranks = 1 + max(map(max, case["pipelines"]))
    program = ps.Program(
        placement, case["num_microbatches"], rules, split=case["split"],
        costs=costs_of(case, placement.num_stages), links=links_of(case, num_ranks),
    )  # fmt: skip
    return str([[str(op) for op in row] for row in program.build().order])


def by_values(case: dict[str, Any]) -> str:
    """What list scheduling by values makes, with the start of every op."""
    placement = ps.Placement(tuple(map(tuple, case["pipelines"])))
    num_ranks, num_stages = 1 + max(map(max, case["pipelines"])), placement.num_stages
    problem = posing.pose(
        costs_of(case, num_stages), placement, num_ranks, case["num_microbatches"], links_of(case, num_ranks),
        [(1.0, case["freed"])] * num_stages, [case["cap"]] * num_ranks, case["split"],
    )  # fmt: skip
    queues = problem.queues.turned() if case["turned"] else problem.queues
    if hasattr(listing, "ListSpace"):
        space = listing.ListSpace.of(queues)
    else:
        space = importlib.import_module("penstock.plan.search").Space(problem)
    space.values[:] = case["values"][: queues.num_ops]
    space.wait[:] = case["wait"]
    if hasattr(listing, "ListSpace"):
        made = listing.list_ops(queues, space, case["turned"], False)
    else:
        made = listing.list_ops(
            queues, space.values, space.wait, case["turned"], space.start, space.row, space.state, space.times
        )
    return str([float(made), *([space.row.tolist(), space.start.tolist()] if made >= 0 else [])])


def simulated(case: dict[str, Any], schedule: ps.Schedule, dispatch: str) -> str:
    """The order in which each rank ran under the simulator, and when the last op ended."""
    limit = {}
    if case["room"] is not None and dispatch == "dynamic":
        costs = costs_of(case, schedule.num_stages)
        held = [case["room"] * peak for peak in ps.simulate(schedule, costs).peak_activations]
        limit = {"memory_limit" if hasattr(listing, "ListSpace") else "max_held": held}
    timeline = ps.simulate(
        schedule, costs_of(case, schedule.num_stages), links=links_of(case, schedule.num_ranks), dispatch=dispatch,
        **limit,
    )  # fmt: skip
    return str([[[str(op.op) for op in row] for row in timeline.rows], timeline.makespan])


def dispatched(case: dict[str, Any], schedule: ps.Schedule, dispatch: Dispatch) -> str:
    """The order in which the runtime's dispatcher lets each rank run; ops end and messages come in any order."""
    source = random.Random(str(case["times"]))
    graph = lower(schedule)
    costs = costs_of(case, schedule.num_stages)
    change = [float(each) for each in memory.memory_changes(graph, costs)]
    caps = memory.frozen_caps(graph, change, None)
    ranks = [
        Dispatcher(graph, r, dispatch, memory_change=change, cap=float(caps[r])) for r in range(schedule.num_ranks)
    ]
    ran: list[list[int]] = [[] for _ in ranks]
    running: dict[int, int] = {}
    messages: list[tuple[int, int]] = []
    while not all(rank.finished for rank in ranks) or running or messages:
        for r, rank in enumerate(ranks):
            if r not in running and (op := rank.next()) is not None:
                running[r] = op
                ran[r].append(op)
        happens = [("end", r) for r in running] + [("arrive", k) for k in range(len(messages))]
        if not happens:
            return "stuck"
        what, which = source.choice(happens)
        if what == "arrive":
            target, op = messages.pop(which)
            ranks[target].arrive(op)
            continue
        op = running.pop(which)
        ranks[which].finish(op)
        after = graph.edge_to[graph.edge_first[op] : graph.edge_first[op + 1]]
        messages += [(graph.rank[to], to) for to in after if graph.rank[to] != which]
    return str(ran)


def answers(seed: int, text: str) -> dict[str, str]:
    """By decider, what it makes of a case: its order, or the rule by which it was refused."""
    case = drawn(seed)
    schedule = read(text)
    asked = {
        "simulator, frozen": lambda: simulated(case, schedule, "frozen"),
        "simulator, dynamic": lambda: simulated(case, schedule, "dynamic"),
        "dispatcher, frozen": lambda: dispatched(case, schedule, Dispatch.FROZEN),
        "dispatcher, dynamic": lambda: dispatched(case, schedule, Dispatch.DYNAMIC),
        "list by rules": lambda: by_rules(case),
        "list by values": lambda: by_values(case),
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except ps.ScheduleError as error:
            found[name] = f"refused (rule: {error.rule})"
    return found


def work(schedules: Path, out: Path, seconds: float) -> None:
    """Answers the cases of a file, with the package of the checkout in whose process this runs."""
    until = time.monotonic() + seconds
    with schedules.open() as given, out.open("w") as written:
        for line in given:
            if time.monotonic() > until:
                break
            seed, text = json.loads(line)
            written.write(json.dumps(answers(seed, text)) + "\n")


def compared(before: Path, cases: int, first: int, seconds: float) -> dict[str, Any]:
    """Runs both checkouts side by side; by decider, in how many of the cases that both came to they agree."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        schedules = folder / "schedules.jsonl"
        with schedules.open("w") as file:
            for seed in range(first, first + cases):
                file.write(json.dumps([seed, given_schedule(seed)]) + "\n")
        outs, processes = [], []
        for name, checkout in (("before", before), ("now", NOW)):
            outs.append(folder / f"{name}.jsonl")
            command = [sys.executable, str(HERE), "--work", str(schedules), str(outs[-1]), str(seconds)]
            environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
            processes.append(subprocess.Popen(command, env=environment))
        ended = [process.wait() for process in processes]
        if any(ended):
            raise SystemExit("one of the two checkouts failed; what it said is above")
        same: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        differ: list[dict[str, Any]] = []
        seeds: dict[str, list[int]] = {}
        names: list[str] = []
        asked = 0
        with outs[0].open() as old, outs[1].open() as new:
            for seed, (one, other) in enumerate(zip(old, new, strict=False), first):
                asked += 1
                was, now = json.loads(one), json.loads(other)
                names = list(now)
                for name in names:
                    same[name] += was[name] == now[name]
                    refused[name] += was[name] == now[name] and was[name].startswith("refused")
                    if was[name] != now[name]:
                        seeds.setdefault(name, []).append(seed)
                        if len(differ) < SHOWN:
                            differ.append({"case": seed, "decider": name, "before": was[name], "now": now[name]})
    return {
        "deciders": {
            name: {"cases": asked, "same": same[name], "of these refused by both": refused[name],
                   "different": seeds.get(name, [])}
            for name in names
        },
        "shown": differ,
    }  # fmt: skip


def main() -> int:
    from experiments.common.record import commit, record  # here, as this file also runs with the package of BEFORE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of commit 59f8f88")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="ask no case later than that")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    here = record()
    head = {
        "command": f"python benchmarks/deciders/run.py BEFORE --cases {given.cases} --first {given.first}",
        "before": commit(given.before),
        "now": commit(NOW),
        "seeds": [given.first, given.first + given.cases - 1],
        "machine": here["machine"],
        "load": here["load"],
    }
    found = compared(given.before.resolve(), given.cases, given.first, given.seconds)
    for name, row in found["deciders"].items():
        print(f"{name}: {row['same']} of {row['cases']} the same, {row['of these refused by both']} of them refused")
    if given.out is not None:
        given.out.write_text(json.dumps(head | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
    else:
        sys.exit(main())
