"""Runs that adapt, with links whose time is counted in steps.

    keep_in_step(monkeypatch)                          each rank a thread: all of an emulated pipeline
    with ps.runtime.EmulatedPipeline(..., links=..., adapt=ps.AdaptOptions(folder=...)) as pipe:
        pipe.step()

    begin = count_time_in_steps()                      each rank a process
    pipe = ps.Pipeline(..., transport=ps.TransportOptions(links=...), adapt=...)
    begin(0)
    pipe.step(...)

The controller's process starts later than a busy machine runs steps, and the clock of links runs while it starts. A
link that turns late after 0.7 s could be late in the first step, or a run could end before anything is decided.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cost import Links
from penstock.runtime import EmulatedPipeline
from penstock.runtime.transport.link_conditions import Conditions
from waiting import keep_up

STEP_NS = 100_000_000
"""How far a step moves the time of links on: a tenth of a second."""


def begin_step(conditions: Conditions, number: int, stretch: float = 1.0) -> None:
    """From now on the time of these links goes on from that of the step's number."""
    conditions.start(conditions.links, stretch, time.perf_counter_ns() - number * STEP_NS)


def keep_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each step of an emulated run that adapts, the controller has heard of the steps before."""
    run = EmulatedPipeline.step
    num_steps: Counter[EmulatedPipeline] = Counter()

    def step(pipe: EmulatedPipeline, *given: Any) -> Any:
        coordinator = None if pipe._agent is None else pipe._agent._coordinator
        if coordinator is not None and coordinator._run_log._folder is not None:
            keep_up(Path(coordinator._run_log._folder), num_steps[pipe])
            begin_step(pipe._conditions, num_steps[pipe], pipe.stretch)
            num_steps[pipe] += 1
        return run(pipe, *given)

    monkeypatch.setattr(EmulatedPipeline, "step", step)


def count_time_in_steps() -> Callable[[int], None]:
    """What a rank's process calls with the number of each step. It concerns the links of pipelines made later."""
    made: list[Conditions] = []
    start = Conditions.start

    def keep(conditions: Conditions, links: Links, *given: Any) -> None:
        if conditions not in made:
            made.append(conditions)
        start(conditions, links, *given)

    def begin(number: int) -> None:
        for each in made:
            begin_step(each, number)

    Conditions.start = keep  # type: ignore[method-assign, assignment]
    return begin
