"""The closed loop on a noisy machine, in simulated time: what share of a fault's cost adapting recovers.

    python benchmarks/adapt/simulated.py                       # every cell, 5 seeds each
    python benchmarks/adapt/simulated.py --seeds 20 --cells zb-60-160 --noise 0.15

A cell names the schedule, the delay (ms) of one link, and for how many steps it is late; delay 0 is no fault. Each
seed draws the noise of its 200 steps: how long a step's ops and messages take is lognormal, half of it carried over
from the step before, and one step in fifty is slow by half. The same steps run three times: with the controller,
without it, and with an oracle that runs the best configuration exactly while the link is late. Printed are medians
over the seeds, and the worst seed:

    recovered   (without - adapted) / (without - oracle); without a fault, the share of the run's time that was lost
    decisions   made while the link was late; false: made before that, or without a fault
    error       of the time a step takes before and with the first change, as its verdict has them, in per cent
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import penstock as ps
from penstock.control import (
    Action,
    Configuration,
    Controller,
    Job,
    Measured,
    Switched,
    candidates,
    measured_events,
    predict,
    run_once,
)

STEPS, ONSET, RANKS, MICROBATCHES = 200, 40, 4, 8
COSTS = ps.Costs.uniform(RANKS, f=10, i=10, w=10)
LATE = [f"{name}-{ms}-160" for name, ms in product(("zb", "1f1b"), (30, 60, 120))]
CELLS = ["zb-0-0", *LATE, "zb-60-20", "zb-60-3"]


@dataclass(frozen=True)
class Outcome:
    """One seed: times of the three runs (ms), and what was decided."""

    adapted: float
    without: float
    oracle: float
    num_right: int
    num_false: int
    error: float | None

    @property
    def recovered(self) -> float:
        if self.without == self.oracle:
            return self.without / self.adapted - 1
        return (self.without - self.adapted) / (self.without - self.oracle)


def job_of(name: str) -> Job:
    schedule = ps.build(name, RANKS, MICROBATCHES)
    return Job(
        COSTS,
        Configuration(schedule, "frozen", (), ps.simulate(schedule, COSTS).peak_activations),
        transport="blocking:1",
    )


def conditions(noise: float, late: dict[int, ps.Links], draw: random.Random) -> list[tuple[ps.Costs, ps.Links]]:
    """Of each step the costs of its ops and the delays of its links."""
    found, carried = [], 0.0
    for step in range(STEPS):
        carried = 0.5 * carried + draw.gauss(0, noise) * math.sqrt(0.75)
        slow = math.exp(carried) * (1.5 if draw.random() < 0.02 else 1.0)
        delays = {(rank, rank + 1): 0.5 * slow * math.exp(draw.gauss(0, 3 * noise)) for rank in range(RANKS - 1)}
        for link, ms in late.get(step, ps.Links()).delays.items():
            delays[link] = delays.get(link, 0.0) + ms * math.exp(draw.gauss(0, noise))
        found.append((ps.Costs.uniform(RANKS, f=10 * slow, i=10 * slow, w=10 * slow), ps.Links(delays)))
    return found


def played(name: str, delay: float, length: int, noise: float, seed: int, lag: int = 2) -> Outcome:
    """Runs one seed. A decision takes `lag` steps, which are a tenth longer, to reach all ranks."""
    job, draw = job_of(name), random.Random(f"{name} {delay} {length} {noise} {seed}")
    link = (seed % (RANKS - 1), seed % (RANKS - 1) + 1)
    fault = ps.Links({link: delay}) if delay else ps.Links()
    steps = conditions(noise, dict.fromkeys(range(ONSET, ONSET + length), fault), draw)
    measured = Measured.steady(fault, frozenset(fault.delays))
    sample = [links for _, links in steps[ONSET : ONSET + max(1, min(length, 8))]]
    found = (each.configuration for each in candidates(job, job.start, measured))
    best = min(found, key=lambda each: predict(job, each, sample))
    times: dict[Configuration, list[float]] = {
        then: [run_once(replace(job, costs=costs), then, links).makespan for costs, links in steps]
        for then in dict.fromkeys((job.start, best))
    }
    controller, adapted, made = Controller(job), 0.0, []
    for step, (costs, links) in enumerate(steps):
        waiting = controller.waiting
        if waiting is not None and step > waiting.iteration + lag:
            controller.feed(Switched(waiting.number))
        timeline = run_once(replace(job, costs=costs), controller.now, links)
        preparing = 1.1 if controller.waiting is not None else 1.0
        adapted += preparing * timeline.makespan
        for event in measured_events(timeline, step, COSTS):
            if hasattr(event, "number"):
                event = type(event)(step, preparing * timeline.makespan)
            made += controller.feed(event)
    error = None
    for verdict in controller.verdicts[:1]:
        then = next(each for each in made if each.number == verdict.number)
        links = fault if then.iteration >= ONSET else ps.Links()
        true = [predict(job, each, [links]) for each in (job.start, then.configuration)]
        error = max(abs(a / b - 1) for a, b in zip((verdict.before, verdict.after), true, strict=True))
    tried = [each.iteration for each in made if each.action not in (Action.TAKE_BACK, Action.UNDELEGATE)]
    right = sum(ONSET <= each < ONSET + length for each in tried)
    without = times[job.start]
    oracle = [*without[:ONSET], *times[best][ONSET : ONSET + length], *without[ONSET + length :]]
    return Outcome(adapted, sum(without), sum(oracle), right, len(tried) - right, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--noise", nargs="+", type=float, default=[0.02, 0.05, 0.15])
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    print("cell          noise   recovered  worst  decisions  false   error")
    for cell, noise in product(given.cells, given.noise):
        name, delay, length = cell.rsplit("-", 2)
        found = [played(name, float(delay), int(length), noise, seed) for seed in range(given.seeds)]
        shares = [each.recovered for each in found]
        right, false = (sum(row) / len(found) for row in zip(*((o.num_right, o.num_false) for o in found)))
        errors = [each.error for each in found if each.error is not None]
        error = f"{100 * median(errors):6.1f}%" if errors else "      -"
        shown = f"{median(shares):11.1%} {min(shares):6.1%} {right:10.1f} {false:6.1f}"
        print(f"{cell:12} {noise:6.0%} {shown} {error}", flush=True)


if __name__ == "__main__":
    main()
