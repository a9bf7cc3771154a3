"""Runs on emulated devices: a rank is a thread that sleeps through its ops; messages are handed over.

Real dispatch, real waiting, real clocks. The gradients' reduction and the step come on top, as in simulation.
"""

from __future__ import annotations

from statistics import median

from clip_methods import ClipRun
from methods import Run

STEPS = 3


def measure(run: Run | ClipRun, stretch: float = 1.0) -> float:
    """Milliseconds of an iteration, the median of several.

    Args:
        stretch: seconds of the clock to one of an op. What is returned is as if it were 1.
    """
    from penstock.runtime.emulation.pipeline import EmulatedPipeline  # here, so that simulation starts without torch

    with EmulatedPipeline(run.schedule, run.costs, links=run.links, stretch=stretch) as pipe:
        timelines = [pipe.step().timeline for _ in range(STEPS)]
    for timeline in timelines:
        if timeline.executed().order != run.schedule.order:
            raise RuntimeError(f"{run.method} ran in another order than its schedule's")
    return median(run.iteration_ms(timeline) for timeline in timelines)
