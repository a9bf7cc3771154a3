"""Runs on emulated devices: a rank is a thread that sleeps through its ops; messages are handed over.

Real dispatch, real waiting, real clocks. Emulated ranks sleep most of their time, so that several runs go at once,
each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from penstock.cost import Costs, Links
from penstock.schedule import Schedule

if TYPE_CHECKING:
    from penstock.simulation import Timeline

STEPS = 3
"""Times that a step is run."""


def emulated(schedule: Schedule, costs: Costs, links: Links, stretch: float, steps: int = STEPS) -> list[Timeline]:
    """The timelines of several steps of a schedule in its own order.

    Args:
        stretch: seconds of the clock to one of an op. What is returned is as if it were 1.
    """
    from penstock.runtime.emulation.pipeline import EmulatedPipeline  # here, so that simulation starts without torch

    with EmulatedPipeline(schedule, costs, links=links, stretch=stretch) as pipe:
        timelines = [pipe.step().timeline for _ in range(steps)]
    for timeline in timelines:
        if timeline.executed().order != schedule.order:
            raise RuntimeError(f"{schedule.name} ran in another order than its schedule's")
    return timelines


def side_by_side(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], jobs: int) -> Iterator[Any]:
    """`function(*case)` of each case, in their order; so many run at once, each in a process of its own."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(function, *case) for case in cases]
        for future in running:
            yield future.result()
