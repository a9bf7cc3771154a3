"""Frozen, hinted, class first and waiting ranks on 240 schedules, and what "auto" chooses: see README.md.

    python benchmarks/dispatch/run.py --out benchmarks/dispatch/results.json
    python benchmarks/dispatch/run.py --emulated --out benchmarks/dispatch/emulated.json
    python benchmarks/dispatch/run.py --readme                    writes the README's tables from the files

The first takes some minutes of one core, the second about two, of which it mostly sleeps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import penstock as ps
from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary, summary_text
from penstock.dispatch import Dispatch
from penstock.formats.native import to_json
from penstock.schedule.messages import remove_communication
from penstock.simulation.auto import POLICIES, choose, jittered
from penstock.simulation.lowered import Order
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

FOLDER = Path(__file__).resolve().parent

SCHEDULES: dict[str, dict[str, int]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved-1f1b": {},
    "looped-bfs": {"stages_per_rank": 2},
    "zb-h1": {},
    "zb-h2": {},
    "zb": {},
    "zb-v": {},
    "v-half": {},
    "v-min": {},
    "chimera": {},
    "hanayo": {},
    "bitpipe": {},
    "dualpipe-v": {},
    "plan": {"max_in_flight_per_rank": 1},
    "plan-v": {"max_in_flight_per_rank": 2},
}
"""What is built, by `ps.build` with its own defaults. The last two are planned for the costs, without links, by
`ps.plan` in `PLAN_SECONDS`, one stage per rank and two in a V, forwards in flight limited to this times the ranks."""
PLAN_SECONDS = 1.0
SIZES = ((4, 8), (4, 16), (6, 12), (8, 16), (8, 32))
"""Ranks and microbatches."""
COSTS: dict[str, tuple[float, float, float]] = {
    "equal": (10.0, 10.0, 10.0),
    "transformer": (10.0, 12.0, 8.0),
    "drawn": (10.0, 11.0, 9.0),
}
"""Milliseconds of F, I and W for each rank's share of the model, shared out evenly to its stages. The third times a
factor for each op of each stage, uniform between 0.75 and 1.25."""
LATE = 30.0
"""Milliseconds, in both directions, of the links that are late."""
EVERY = 0.5
"""Milliseconds of every link in the second row."""
JITTER, NUM_JITTER, NUM_GIVEN = 0.2, 5, 8
"""Standard deviation of the logarithm of each op's duration; draws that are measured; draws that "auto" sees."""
UNEVEN, NUM_UNEVEN = 0.5, 3
"""Standard deviation of the logarithm of each microbatch's factor, and draws."""
SAMPLE = "zb-v 4x8 drawn"
"""The schedule whose cases are kept one by one."""
ROWS = ("no delay", "0.5 ms on every link", "one link late", "two links late", "jitter", "jitter, known", "uneven")
NAMES = {str(policy): policy for policy in POLICIES}
OTHERS = tuple(name for name in NAMES if name != "frozen")
THREE = ("frozen", "hinted", "dynamic")

EMULATED = (
    ("1f1b", 4, 8, "no delay"), ("interleaved-1f1b", 4, 8, "no delay"), ("zb-v", 4, 8, "0.5 ms on every link"),
    ("zb-h1", 8, 16, "0.5 ms on every link"), ("zb", 4, 8, "one link late"), ("zb-h2", 8, 16, "one link late"),
    ("interleaved-1f1b", 4, 8, "one link late"), ("zb-v", 4, 8, "two links late"), ("zb", 8, 16, "two links late"),
    ("hanayo", 4, 8, "two links late"), ("zb-h1", 4, 8, "uneven"), ("zb-v", 8, 16, "uneven"),
)  # fmt: skip
"""Cases with transformer costs that also run on emulated devices, threads, three steps each."""


class Problem(NamedTuple):
    """A schedule and its costs."""

    name: str
    num_ranks: int
    num_microbatches: int
    kind: str
    schedule: ps.Schedule
    costs: ps.Costs

    @property
    def label(self) -> str:
        return f"{self.name} {self.num_ranks}x{self.num_microbatches} {self.kind}"


def _costs(kind: str, name: str, num_ranks: int, num_stages: int) -> ps.Costs:
    rng = random.Random(f"{kind} {name} {num_ranks} {num_stages}")
    low, high = (0.75, 1.25) if kind == "drawn" else (1.0, 1.0)
    rows = [[ms * num_ranks / num_stages * rng.uniform(low, high) for _ in range(num_stages)] for ms in COSTS[kind]]
    return ps.Costs(*rows)


def problem(name: str, num_ranks: int, num_microbatches: int, kind: str) -> Problem:
    """One of the 240."""
    options = SCHEDULES[name]
    if name.startswith("plan"):
        placement = ps.placements.v_shape(num_ranks) if name == "plan-v" else ps.placements.one_to_one(num_ranks)
        costs = _costs(kind, name, num_ranks, placement.num_stages)
        limit = options["max_in_flight_per_rank"] * num_ranks
        schedule = ps.plan(
            costs, num_ranks, num_microbatches, max_in_flight=limit, placement=placement, time_limit=PLAN_SECONDS
        ).schedule
    else:
        given = {"num_stages": options["stages_per_rank"] * num_ranks} if options else {}
        schedule = remove_communication(ps.build(name, num_ranks, num_microbatches, **given))
        costs = _costs(kind, name, num_ranks, schedule.num_stages)
    return Problem(name, num_ranks, num_microbatches, kind, schedule, costs)


def problems() -> Iterator[Problem]:
    for name in SCHEDULES:
        for num_ranks, num_microbatches in SIZES:
            for kind in COSTS:
                yield problem(name, num_ranks, num_microbatches, kind)


def late_links(given: Problem, order: Order, count: int) -> ps.Links:
    """Some of the links that the schedule uses, late."""
    used = sorted({tuple(sorted(order.ends(link))) for link in np.unique(order.crossing[2]).tolist()})
    chosen = random.Random(f"{given.label} {count}").sample(used, count)
    return ps.Links({ends: LATE for a, b in chosen for ends in ((a, b), (b, a))})


def uneven(given: Problem, draw: int) -> ps.Costs:
    rng = np.random.default_rng([draw, *given.label.encode()])
    return replace(given.costs, uneven=rng.lognormal(0, UNEVEN, given.num_microbatches).tolist())


def measured(given: Problem) -> Iterator[tuple[str, dict[str, float], str]]:
    """For each row, and each draw, the makespans (ms) under all policies, and what "auto" chose."""
    runner = Runner(given.costs, compile=True)
    order = runner.order(given.schedule)

    def all_of(runner: Runner, order: Order, links: ps.Links) -> tuple[dict[str, float], str]:
        choice = choose(runner, order, links, Decoupled(), order.peaks)
        return choice.means, str(choice.policy)

    yield ROWS[0], *all_of(runner, order, ps.Links())
    yield ROWS[1], *all_of(runner, order, ps.Links(default=EVERY))
    yield ROWS[2], *all_of(runner, order, late_links(given, order, 1))
    yield ROWS[3], *all_of(runner, order, late_links(given, order, 2))

    due = runner.run(order, ps.Links(), transport=Decoupled()).start_time
    seen = jittered(order, JITTER, NUM_GIVEN, seed=0)
    chosen = str(choose(runner, order, ps.Links(), Decoupled(), order.peaks, draws=seen).policy)
    for real in jittered(order, JITTER, NUM_JITTER, seed=1):
        makespans = {
            name: runner.run(
                real, ps.Links(), dispatch=policy, transport=Decoupled(), caps=order.peaks, due=due
            ).makespan
            for name, policy in NAMES.items()
        }
        yield ROWS[4], makespans, chosen
        yield ROWS[5], *all_of(runner, real, ps.Links())
    for draw in range(NUM_UNEVEN):
        runner = Runner(uneven(given, draw), compile=True)
        yield ROWS[6], *all_of(runner, runner.order(given.schedule), ps.Links())


def simulated() -> dict[str, Any]:
    """The table, and the cases of one schedule, with which a later checkout can be compared."""
    began = time.perf_counter()
    cases: list[dict[str, Any]] = []
    digests = {}
    for number, given in enumerate(problems()):
        if number % 24 == 0:
            print(f"{number} of 240, {time.perf_counter() - began:.0f} s", file=sys.stderr)
        digests[given.label] = hashlib.sha256(to_json(given.schedule).encode()).hexdigest()[:12]
        for row, makespans, chosen in measured(given):
            frozen = makespans["frozen"]
            cases.append(
                {
                    "problem": given.label,
                    "row": row,
                    "frozen_ms": round(frozen, 3),
                    "over_frozen": {
                        name: round(ms / frozen, 5) for name, ms in makespans.items() if name != "frozen"
                    },
                    "auto": chosen,
                }
            )
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "num_schedules": len(digests),
        "schedules": hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        "rows": {row: summary([case for case in cases if case["row"] == row]) for row in ROWS},
        "sample": {
            "problem": SAMPLE,
            "cases": [[case["row"], case["frozen_ms"], case["auto"]] for case in cases if case["problem"] == SAMPLE],
        },
    }


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Makespan over frozen: the mean, the worst, and cases more than 2% slower."""

    def said(values: list[float]) -> dict[str, float]:
        over = np.array(values)
        return {
            "mean": round(float(over.mean()), 4), "worst": round(float(over.max()), 4),
            "above_2_percent": int((over > 1.02).sum()),
        }  # fmt: skip

    over = [{"frozen": 1.0, **case["over_frozen"]} for case in cases]
    found = {name: said([each[name] for each in over]) for name in OTHERS}
    found["best of three"] = said([min(each[name] for name in THREE) for each in over])
    found["auto"] = said([each[case["auto"]] for each, case in zip(over, cases, strict=True)])
    chosen = [case["auto"] for case in cases]
    return {"cases": len(cases), "chosen": {name: chosen.count(name) for name in NAMES}, **found}


def emulated() -> dict[str, Any]:
    """The twelve cases on emulated devices: measured and simulated makespans (ms), and what auto took."""
    cases = []
    for name, num_ranks, num_microbatches, row in EMULATED:
        given = problem(name, num_ranks, num_microbatches, "transformer")
        order = Runner(given.costs).order(given.schedule)
        links, costs = ps.Links(), given.costs
        if row == ROWS[1]:
            links = ps.Links(default=EVERY)
        elif row in ROWS[2:4]:
            links = late_links(given, order, ROWS.index(row) - 1)
        elif row == ROWS[6]:
            costs = uneven(given, 0)
        case: dict[str, Any] = {"problem": given.label, "row": row, "measured": {}, "simulated": {}}
        for dispatch in (*map(str, Dispatch), "auto"):
            run = ps.emulate(given.schedule, costs, links=links, dispatch=dispatch, num_steps=3)
            if dispatch == "auto":
                case["auto"] = run.timelines[0].dispatch
            case["measured"][dispatch] = round(sorted(each.makespan for each in run.timelines)[1], 2)
            case["simulated"][dispatch] = round(run.simulated[0].makespan, 2)
        print(json.dumps(case), file=sys.stderr)
        cases.append(case)
    return {"cases": cases}


def tables() -> str:
    """The README's tables, from the files of results."""
    results = json.loads((FOLDER / "results.json").read_text())
    shown = {
        "dynamic": "class first", "hinted": "hinted", "hinted:0.5": "hinted:0.5", "hinted:1": "hinted:1",
        "best of three": "best of three", "auto": "auto",
    }  # fmt: skip
    lines = [
        f"Commit {results['commit'][:12]}, `{results['command']}`, {results['seconds']:.0f} s.", "",
        "| | cases | " + " | ".join(shown.values()) + " |", "|---|---:|" + "---:|" * len(shown),
    ]  # fmt: skip
    for row, found in results["rows"].items():
        cells = [
            f"{found[name]['mean']:.3f} ({found[name]['worst']:.2f}; {found[name]['above_2_percent']})"
            for name in shown
        ]
        lines.append(f"| {row} | {found['cases']} | " + " | ".join(cells) + " |")
    lines += ["", "What auto chose:", "", "| | " + " | ".join(NAMES) + " |", "|---|" + "---:|" * len(NAMES)]
    for row, found in results["rows"].items():
        lines.append(f"| {row} | " + " | ".join(str(found["chosen"][name]) for name in NAMES) + " |")
    if (FOLDER / "emulated.json").exists():
        cases = json.loads((FOLDER / "emulated.json").read_text())["cases"]
        ways = (*THREE, "auto")
        lines += [
            "",
            "On emulated devices, measured / simulated ms:",
            "",
            "| | | " + " | ".join(ways) + " | chosen |",
        ]
        lines.append("|---|---|" + "---:|" * len(ways) + "---|")
        for case in cases:
            cells = [f"{case['measured'][way]:.0f} / {case['simulated'][way]:.0f}" for way in ways]
            lines.append(f"| {case['problem']} | {case['row']} | " + " | ".join(cells) + f" | {case['auto']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.readme:
        write_between(FOLDER / "README.md", "results", tables())
        return
    found = {**record(), **(emulated() if asked.emulated else simulated())}
    if asked.out is None:
        print(summary_text(found), end="")
    else:
        save_summary(asked.out, found)


if __name__ == "__main__":
    main()
