"""How good a choice of policy can be that knows of jitter its sigma alone: see README.md.

    python benchmarks/dispatch/by_sigma.py
    python benchmarks/dispatch/by_sigma.py --readme      writes the table there from by_sigma.json

The cases are those of the row "jitter" in `run.py`: the same schedules, seeds and draws. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import run as benchmark

import penstock as ps
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.engine.network import Array
from penstock.simulation.auto import choose, jittered
from penstock.simulation.lowered import Order
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

NUM_FRESH = 40
"""Draws of their own from which the expected makespan of each policy is known much better than auto knows it."""
NAMES = tuple(benchmark.NAMES)
THREE = tuple(NAMES.index(name) for name in benchmark.THREE)
ALL = tuple(range(len(NAMES)))
FROZEN = NAMES.index("frozen")


def over_frozen(given: benchmark.Problem) -> dict[str, list[float]]:
    """Makespan over frozen on the draws that are measured, for several ways to choose a policy."""
    runner = Runner(given.costs, compile=True)
    order = runner.order(given.schedule)
    due = runner.run(order, ps.Links(), transport=Decoupled()).start_time

    def makespans(draws: Sequence[Order]) -> Array:
        return np.array(
            [
                [
                    runner.run(
                        each, ps.Links(), dispatch=policy, transport=Decoupled(), caps=order.peaks, due=due
                    ).makespan
                    for each in draws
                ]
                for policy in benchmark.NAMES.values()
            ]
        )

    seen = jittered(order, benchmark.JITTER, benchmark.NUM_GIVEN, seed=0)
    chosen = choose(runner, order, ps.Links(), Decoupled(), order.peaks, draws=seen).policy
    real = makespans(jittered(order, benchmark.JITTER, benchmark.NUM_JITTER, seed=1))
    fresh = makespans(jittered(order, benchmark.JITTER, NUM_FRESH, seed=2))
    over = real / real[FROZEN]

    def by_mean(makespan: Array, among: Sequence[int]) -> list[float]:
        """One policy for the schedule: that whose mean is least."""
        return list(over[min(among, key=lambda p: float(makespan[p].mean()))].tolist())

    return {
        "auto": over[NAMES.index(str(chosen))].tolist(),
        "expected, of three": by_mean(fresh, THREE),
        "expected, of all": by_mean(fresh, ALL),
        "told the draws' mean, of three": by_mean(real, THREE),
        "told the draws' mean, of all": by_mean(real, ALL),
        "told each draw, of three": over[list(THREE)].min(0).tolist(),
        "told each draw, of all": over.min(0).tolist(),
    }


WORDS = {
    "auto": "auto: eight draws of its own",
    "expected, of three": f"least expected, of frozen, hinted, class first: {NUM_FRESH} draws of its own",
    "expected, of all": "least expected, of all five",
    "told the draws' mean, of three": "told the mean over the five draws that are measured, of three",
    "told the draws' mean, of all": "the same, of all five",
    "told each draw, of three": "told each draw (*best of three*)",
    "told each draw, of all": "told each draw, of all five",
}


def table(ways: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table of README.md."""
    body = [[said, f"{ways[name]['mean']:.4f}", f"{ways[name]['worst']:.2f}"] for name, said in WORDS.items()]
    return markdown(["how the policy is chosen", "mean", "worst"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("by_sigma.json"))
    parser.add_argument("--readme", action="store_true", help="only write the table of README.md")
    asked = parser.parse_args()
    if asked.readme:
        ways = json.loads(asked.out.read_text())["ways"]
        write_between(Path(__file__).with_name("README.md"), "by sigma", table(ways))
        return
    known = record()
    found: dict[str, list[float]] = {}
    for given in benchmark.problems():
        for name, values in over_frozen(given).items():
            found.setdefault(name, []).extend(values)
    results = {
        **known,
        "fresh_draws": NUM_FRESH,
        "ways": {
            name: {"cases": len(values), "mean": round(float(np.mean(values)), 4), "worst": round(max(values), 4)}
            for name, values in found.items()
        },
    }
    save_summary(asked.out, results)


if __name__ == "__main__":
    main()
