"""Trials on emulated devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from experiments.amdp.methods import Trial
from experiments.common.measured import STEPS, emulated, side_by_side
from experiments.common.results import Row


def measure_all(trials: Sequence[Trial], stretch: float = 1.0, jobs: int = 4) -> Iterator[Row]:
    """What `measure` gives, in the order of the trials; so many run at once."""
    yield from side_by_side(measure, [(trial, stretch) for trial in trials], jobs)


def measure(trial: Trial, stretch: float = 1.0) -> Row:
    """Thousands of tokens a second (the median of several steps where each is drained), and makespans (ms).

    Args:
        stretch: seconds of the clock to one of an op. What is returned is as if it were 1.
    """
    num_steps = STEPS if trial.num_windows == 1 else 1
    timelines = emulated(trial.schedule, trial.costs, trial.links, stretch, num_steps)
    return {
        "measured": median(map(trial.ktokens, timelines)),
        "measured_ms": [timeline.makespan for timeline in timelines],
    }
