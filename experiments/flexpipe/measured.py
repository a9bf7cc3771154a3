"""Runs on emulated devices. The gradients' reduction and the step come on top, as in simulation."""

from __future__ import annotations

from statistics import median

from experiments.common.measured import emulated
from experiments.flexpipe.clip_methods import ClipRun
from experiments.flexpipe.methods import Run


def measure(run: Run | ClipRun, stretch: float = 1.0) -> float:
    """Milliseconds of an iteration, the median of several.

    Args:
        stretch: seconds of the clock to one of an op. What is returned is as if it were 1.
    """
    return median(map(run.iteration_ms, emulated(run.schedule, run.costs, run.links, stretch)))
