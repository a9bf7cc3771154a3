"""PipeMorph's lasting slow links (Figures 15 to 17) as simulation: what the controller decides, and how good it is.

    python experiments/pipemorph/slow_links.py
    python experiments/pipemorph/slow_links.py --search 60

8 ranks, 32 microbatches, 10 ms ops; no rank above the peak of frozen `zb` with warm-ups 2(S-i)-1. Delays are latency.
The links turn slow after 10 iterations. Columns, in ms an iteration:

    zb           frozen, direct links that hold 2 messages under way
    delegated    frozen, all links delegated: PipeMorph-CPU
    decided      what runs once the controller has decided; `after` says how many slow iterations it took
    best         the shortest that `ps.plan` found in `--search` seconds, or `decided` where that is shorter
    bound        no schedule under the cap is shorter
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.control import Configuration, Controller, Job, rehearse, run_once
from penstock.control.configuration import peaks
from penstock.cost import LinkCondition, LinkConditions
from penstock.cost.over_time import Trace

RANKS, MICROBATCHES, OP = 8, 32, 10.0
HEALTHY = 10
"""Iterations before the links turn slow."""
CASES: dict[str, dict[tuple[int, int], float]] = {
    **{f"last, {ms:g} ms": {(6, 7): ms} for ms in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)},
    "first, 30 ms": {(0, 1): 30.0},
    "first, 60 ms": {(0, 1): 60.0},
    "two adjacent, 30 ms": {(0, 1): 30.0, (1, 2): 30.0},
    "two skipping, 30 ms": {(0, 1): 30.0, (2, 3): 30.0},
    "first and last, 30 ms": {(0, 1): 30.0, (6, 7): 30.0},
    "three skipping, 30 ms": {(0, 1): 30.0, (3, 4): 30.0, (6, 7): 30.0},
}
PAPER = {"last, 60 ms": 1.13}
"""Slowdowns that the paper gives in words."""


def case(name: str, delays: dict[tuple[int, int], float], search: float) -> dict[str, Any]:
    costs = ps.Costs.uniform(RANKS, OP, OP, OP)
    zb = ps.build("zb", RANKS, MICROBATCHES)
    caps = tuple(peaks(zb, costs))
    job = Job(costs, Configuration(zb, "frozen", (), caps))
    links = ps.Links(delays)
    healthy = run_once(job, job.start, ps.Links()).makespan
    begins = HEALTHY * healthy
    conditions = LinkConditions(
        {link: LinkCondition(Trace((0.0, begins), (0.0, delay))) for link, delay in delays.items()}
    )
    run = rehearse(Controller(job), conditions, until=begins + 30 * healthy)
    last = run.iterations[-1]
    now = run.decisions[-1].configuration if run.decisions else job.start
    plan = ps.plan(costs, RANKS, MICROBATCHES, links, memory_limit=list(caps), time_limit=search)
    best = min(plan.makespan, last.ms)
    changed = [each.number for each in run.iterations if each.decision]
    return {
        "case": name,
        "no_delay_ms": healthy,
        "zb_ms": run_once(job, job.start, links).makespan,
        "delegated_ms": run_once(job, replace(job.start, delegated=tuple(delays)), links).makespan,
        "decided_ms": last.ms,
        "slowdown": last.ms / healthy,
        "paper_slowdown": PAPER.get(name),
        "slow_iterations_before_the_new_plan": changed[0] - HEALTHY if changed else None,
        "decisions": [decision.action.value for decision in run.decisions],
        "dispatch": now.dispatch.value,
        "delegated": [f"{a}:{b}" for a, b in now.delegated],
        "largest_peak_over_cap": max(p / c for each in run.iterations for p, c in zip(each.peaks, caps, strict=True)),
        "best_ms": best,
        "bound_ms": plan.lower_bound,
        "over_best": last.ms / best - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=float, default=10.0, help="seconds for ps.plan, each case")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("slow_links.json"))
    given = parser.parse_args()
    found = []
    print(f"{'links':24}{'zb':>7}{'delegated':>11}{'decided':>9}{'after':>7}{'best':>7}{'bound':>8}{'slowdown':>10}")
    for name, delays in CASES.items():
        row = case(name, delays, given.search)
        found.append(row)
        after = row["slow_iterations_before_the_new_plan"]
        print(
            f"{name:24}{row['zb_ms']:7.0f}{row['delegated_ms']:11.0f}{row['decided_ms']:9.0f}"
            f"{'-' if after is None else after:>7}{row['best_ms']:7.0f}{row['bound_ms']:8.1f}{row['slowdown']:10.3f}",
            flush=True,
        )
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
