"""Trials on emulated devices: a rank is a thread that sleeps through its ops; messages are handed over.

Real dispatch, real waiting, real clocks. Emulated ranks sleep most of their time, so that several trials run at once,
each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from methods import Trial
from results import Row

STEPS = 3
"""Times that a drained step is run."""


def measure_all(trials: Sequence[Trial], stretch: float = 1.0, jobs: int = 4) -> Iterator[Row]:
    """What `measure` gives, in the order of the trials; so many run at once."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_path, initargs=(sys.path,)) as pool:
        running = [pool.submit(measure, trial, stretch) for trial in trials]
        for future in running:
            yield future.result()


def measure(trial: Trial, stretch: float = 1.0) -> Row:
    """Thousands of tokens a second (the median of several steps where each is drained), and makespans (ms).

    Args:
        stretch: seconds of the clock to one of an op. What is returned is as if it were 1.
    """
    from penstock.runtime.emulation.pipeline import EmulatedPipeline  # here, so that simulation starts without torch

    num_steps = STEPS if trial.num_windows == 1 else 1
    with EmulatedPipeline(trial.schedule, trial.costs, links=trial.links, stretch=stretch) as pipe:
        steps = [pipe.step() for _ in range(num_steps)]
    for step in steps:
        if step.timeline.executed().order != trial.schedule.order:
            raise RuntimeError(f"{trial.method} ran in another order than its schedule's")
    return {
        "measured": median(trial.ktokens(step.timeline) for step in steps),
        "measured_ms": [step.timeline.makespan for step in steps],
    }


def _path(path: list[str]) -> None:
    sys.path[:] = path
