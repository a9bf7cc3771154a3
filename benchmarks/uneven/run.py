"""The order of microbatches that differ, against order of arrival: see README.md.

python benchmarks/uneven/run.py --out benchmarks/uneven/results.json       some minutes of one core
python benchmarks/uneven/run.py --times --out benchmarks/uneven/times.json half a minute, on an idle machine
python benchmarks/uneven/run.py --assignment --out benchmarks/uneven/assignment.json        a second
python benchmarks/uneven/run.py --readme                                   writes the README's tables from the files
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import penstock as ps
from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary, summary_text
from experiments.uneven.long_tails import long_tailed
from penstock.dispatch import Dispatch
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

FOLDER = Path(__file__).resolve().parent

SCHEDULES = (("1f1b", 8), ("1f1b", 16), ("interleaved-1f1b", 8), ("zb-h1", 8), ("zb", 8), ("zb-v", 8))
"""Names, as `ps.build` makes them by default, and ranks. There are four microbatches per rank."""
MS = 10.0
"""Of F, of I and of W, for each rank's share of the model."""
SIGMAS = (0.3, 0.6, 1.0)
"""Standard deviation of the logarithm of the factor of each microbatch, which is alike on times and activations."""
NUM_DRAWS = 20
"""Seeds 0 to 19."""
ERROR, NOISE = 0.05, 0.05
"""Standard deviation of the logarithm of the error of a predicted factor, and the gain that is asked for then."""
SAMPLE = ("zb-h1", 8, 0.6, 3)
"""The schedule, ranks, sigma and seed of the case that is kept by itself."""
HELD = ("held", "held in the order")
ERRORS = ("with errors: mean", "with errors: worst")
WAYS = ("arrival", "dispatch", "rules", "moves", "size, own: rules", "size: rules", "size: moves")
"""arrival: frozen, in order of arrival. dispatch: that order under the best of the three dispatches. rules, moves:
orders by rules, and after 300 moves, each rank's memory that of the schedule by count. size: activations are as long
as times, and no rank may hold more than the largest does in order of arrival; own: than it does itself."""
MOVES_S = 60.0
"""More than 300 moves take."""
TIMED = (("1f1b", 8), ("zb-h1", 8), ("zb", 8), ("zb-v", 8), ("interleaved-1f1b", 8))

ASSIGNED = ((32, 8), (8, 32), (128, 8))
"""Replicas, and microbatches of each, whose lengths have a tail as in production; steps 0 to 19."""


def drawn(sigma: float, num: int, seed: int) -> list[float]:
    factors: list[float] = np.random.default_rng([seed, round(sigma * 10)]).lognormal(0, sigma, num).tolist()
    return factors


def costs_of(schedule: ps.Schedule) -> ps.Costs:
    each = MS * schedule.num_ranks / schedule.num_stages
    return ps.Costs.uniform(schedule.num_stages, each, each, each)


def measured(schedule: ps.Schedule, factors: Sequence[float]) -> dict[str, float]:
    """By way, the makespan over the mean work per rank; and what the orders by count hold, by size."""
    even = costs_of(schedule)
    by_count = replace(even, uneven=factors)
    by_size = replace(even, uneven={"time": factors, "activation": factors})
    work = 3 * MS * sum(factors)
    runner = Runner(by_count)
    order = runner.order(schedule)
    runs = [
        runner.run(order, ps.Links(), dispatch=each, transport=Decoupled(), caps=order.peaks).makespan
        for each in Dispatch
    ]
    held = Runner(by_size).order(schedule).peaks
    found = {
        "rules": ps.planning.order_microbatches(schedule, by_count),
        "moves": ps.planning.order_microbatches(schedule, by_count, time_limit=MOVES_S),
        "size, own: rules": ps.planning.order_microbatches(schedule, by_size),
        "size: rules": ps.planning.order_microbatches(schedule, by_size, memory_limit=max(held)),
        "size: moves": ps.planning.order_microbatches(schedule, by_size, memory_limit=max(held), time_limit=MOVES_S),
    }
    ways = {"arrival": found["rules"].arrival, "dispatch": min(runs)}
    ways |= {way: each.makespan for way, each in found.items()}
    count = max(ps.simulate(schedule, even).peak_activations) * fmean(factors)
    moved = max(Runner(by_size).order(found["rules"].schedule).peaks)
    return {
        **{way: round(ways[way] / work, 4) for way in WAYS},
        "held": round(max(held) / count, 4),
        "held in the order": round(moved / count, 4),
    }


def under_errors(schedule: ps.Schedule, factors: Sequence[float], seed: int) -> float:
    """The makespan of what was planned by predicted factors, run over the real ones, over that of arrival."""
    error = np.random.default_rng([seed, 99]).lognormal(0, ERROR, len(factors))
    even = costs_of(schedule)
    predicted, real = (replace(even, uneven=list(each)) for each in (np.array(factors) * error, factors))
    planned = ps.planning.order_microbatches(schedule, predicted, noise=NOISE)
    runner = Runner(real)
    times = [
        runner.run(
            runner.order(each), ps.Links(), dispatch=dispatch, transport=Decoupled(), caps=planned.caps
        ).makespan
        for each, dispatch in ((planned.schedule, planned.dispatch), (schedule, Dispatch.FROZEN))
    ]
    return round(times[0] / times[1], 4)


def simulated() -> dict[str, Any]:
    cases = []
    for name, num_ranks in SCHEDULES:
        schedule = ps.build(name, num_ranks, 4 * num_ranks)
        for sigma in SIGMAS:
            for seed in range(NUM_DRAWS):
                factors = drawn(sigma, 4 * num_ranks, seed)
                error = under_errors(schedule, factors, seed)
                cases.append([name, num_ranks, sigma, seed, *measured(schedule, factors).values(), error])
    return {
        "num_draws": NUM_DRAWS,
        "columns": ["schedule", "ranks", "sigma", *WAYS, *HELD, *ERRORS],
        "rows": summary(cases),
        "slower_than_arrival": sum(slower(case) for case in cases),
        "sample": next(case for case in cases if tuple(case[:4]) == SAMPLE),
    }


def slower(case: Sequence[Any]) -> bool:
    """Whether a way takes longer than the order of arrival, or moves made an order longer than the rules had."""
    ways = dict(zip(WAYS, case[4:], strict=False))
    return (
        max(ways.values()) > ways["arrival"]
        or ways["moves"] > ways["rules"]
        or ways["size: moves"] > ways["size: rules"]
    )


def summary(cases: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """For each schedule and sigma the means over the draws, and the worst under errors, as `columns` names them."""
    rows = []
    for name, num_ranks in SCHEDULES:
        for sigma in SIGMAS:
            mine = [case[4:] for case in cases if list(case[:3]) == [name, num_ranks, sigma]]
            means = [fmean(column) for column in zip(*mine, strict=True)]
            rows.append([name, num_ranks, sigma, *means, max(case[-1] for case in mine)])
    return rows


def timed() -> dict[str, Any]:
    """Milliseconds of planning the order of a step, by rules and with 300 moves; the schedule was ordered before."""
    found = {}
    for name, num_ranks in TIMED:
        schedule = ps.build(name, num_ranks, 4 * num_ranks)
        row = {}
        for way, limit in (("rules", 0.0), ("moves", MOVES_S)):
            took = []
            for seed in range(NUM_DRAWS + 1):
                costs = replace(costs_of(schedule), uneven=drawn(0.6, 4 * num_ranks, seed))
                planned = ps.planning.order_microbatches(schedule, costs, time_limit=limit)
                took.append(1e3 * planned.seconds)
            row[way] = {"median": round(median(took[1:]), 2), "most": round(max(took[1:]), 2)}
        found[f"{name}, {num_ranks} ranks"] = row
    return {"ms": found}


def assigned() -> dict[str, Any]:
    """Processor time in ms to assign a step's microbatches to replicas, and the busiest one's work over the mean."""
    found = {}
    for replicas, each in ASSIGNED:
        took, busiest = [], []
        for seed in range(NUM_DRAWS + 1):
            work = long_tailed(replicas * each, 8192, seed, longest=2.3)
            began = time.process_time()
            groups = ps.planning.assign_evenly(work, replicas)
            took.append(1e3 * (time.process_time() - began))
            sums = [int(work[group].sum()) for group in groups]
            busiest.append(max(sums) / fmean(sums))
        found[f"{replicas} replicas of {each}"] = {
            "median": round(median(took[1:]), 2),
            "most": round(max(took[1:]), 2),
            "busiest": round(fmean(busiest[1:]), 4),
        }
    return {"ms": found}


def tables() -> str:
    """The README's tables, from the results."""
    rows = json.loads((FOLDER / "results.json").read_text())["rows"]
    lines = ["| | sigma | " + " | ".join(WAYS) + " |", "|---|---|" + "---|" * len(WAYS)]
    notes = ["| | sigma | held, arrival | held, by rules | with errors: mean | worst |", "|---|---|---|---|---|---|"]
    for name, num_ranks, sigma, *means in rows:
        label = f"| {name}, {num_ranks} ranks | {sigma} | "
        lines.append(label + " | ".join(f"{each:.2f}" for each in means[: len(WAYS)]) + " |")
        held, errors = means[len(WAYS) : -len(ERRORS)], means[-len(ERRORS) :]
        cells = [*(f"{each:.2f}" for each in held), *(f"{each:.3f}" for each in errors)]
        notes.append(label + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n\n" + "\n".join(notes)
    ms = json.loads((FOLDER / "times.json").read_text())["ms"]
    text += "\n\n| ms | by rules: median | most | and 300 moves: median | most |\n|---|---|---|---|---|\n"
    each = ("rules", "median"), ("rules", "most"), ("moves", "median"), ("moves", "most")
    text += "\n".join(
        f"| {name} | " + " | ".join(f"{row[way][what]:.1f}" for way, what in each) + " |" for name, row in ms.items()
    )
    ms = json.loads((FOLDER / "assignment.json").read_text())["ms"]
    text += "\n\n| assigned to | ms: median | most | busiest over the mean |\n|---|---|---|---|\n"
    return text + "\n".join(
        f"| {name} | {row['median']:.1f} | {row['most']:.1f} | {row['busiest']:.4f} |" for name, row in ms.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--assignment", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.readme:
        write_between(FOLDER / "README.md", "results", tables())
        return
    found = {**record(), **(assigned() if asked.assignment else timed() if asked.times else simulated())}
    if asked.out is None:
        print(summary_text(found), end="")
    else:
        save_summary(asked.out, found)


if __name__ == "__main__":
    main()
