"""A layout of Megatron's judged by simulation, and one with the same stages whose step is shorter.

What counts is the step, not the costliest stage: where a rank has several stages their sum counts too, and what fills
and drains the pipeline. So blocks are moved from stage to stage as long as the simulated step becomes shorter, and no
rank comes to hold more than the fullest did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.cost import Costs
from penstock.formats.megatron_layout import LETTERS, MegatronLayout
from penstock.library import build
from penstock.schedule import Schedule
from penstock.simulation import simulate
from penstock.tune.errors import TuneError

__all__ = ["MOST_TRIALS", "SimulatedLayout", "LayerTimes", "better_layout", "judge_layout"]

MOST_TRIALS = 2000
"""Layouts simulated at most in the search for a better one."""


@dataclass(frozen=True)
class LayerTimes:
    """What one layer of each letter takes, in ms or any unit, for one microbatch.

    Attributes:
        forward: by letter. backward: how many times as long the backward is; half of it is I, half W.
    """

    forward: Mapping[str, float]
    backward: float = 2.0

    def __post_init__(self) -> None:
        for letter, time in self.forward.items():
            if letter not in LETTERS:
                raise TuneError(f"{letter!r} is no layer of a layout; give times for {', '.join(LETTERS)}")
            if not (math.isfinite(time) and time >= 0):
                raise TuneError(f"{letter} takes {time}: give a number of at least 0")
        if not self.forward.get("t"):
            raise TuneError("give the time of a block (t), which is above 0")
        if not (math.isfinite(self.backward) and self.backward >= 0):
            raise TuneError(f"the backward takes {self.backward} times as long: give a number of at least 0")

    def costs(self, layout: MegatronLayout) -> Costs:
        """By stage; a stage keeps one activation unit per block and per m."""
        f = [sum(self.forward.get(letter, 0.0) for letter in stage) for stage in layout.stages]
        half = [time * self.backward / 2 for time in f]
        kept = [float(stage.count("t") + stage.count("m")) for stage in layout.stages]
        return Costs(f=f, i=half, w=half, activation=kept)


@dataclass(frozen=True)
class SimulatedLayout:
    """A layout and its simulated step.

    Attributes:
        makespan: of the step, in the unit of the times. bubble: the share of it that ranks idle, their mean.
        busy: time that each rank computes. peak: activations that each rank holds at most, in blocks.
    """

    layout: MegatronLayout
    makespan: float
    bubble: float
    busy: tuple[float, ...]
    peak: tuple[float, ...]


def judge_layout(layout: MegatronLayout, num_ranks: int, num_microbatches: int, times: LayerTimes) -> SimulatedLayout:
    """The step of a layout under Megatron's schedule: 1F1B with one stage per rank, interleaved 1F1B with several.

    Raises:
        ScheduleError: stages that do not spread over the ranks, microbatches that are no multiple of them.
    """
    layout.check_ranks(num_ranks)
    return _judged(layout, _schedule(layout, num_ranks, num_microbatches), times)


def better_layout(
    layout: MegatronLayout, num_ranks: int, num_microbatches: int, times: LayerTimes
) -> SimulatedLayout:
    """The layout with blocks moved between stages until no move makes the simulated step shorter.

    As many stages, and the other layers where they are; no rank holds more activations than the fullest of the layout
    given. That one is returned where nothing better was found in 2,000 trials.
    """
    layout.check_ranks(num_ranks)
    schedule = _schedule(layout, num_ranks, num_microbatches)
    best = _judged(layout, schedule, times)
    room, trials, tried = max(best.peak), 0, {best.layout.counts}
    improved = True
    while improved and trials < MOST_TRIALS:
        improved = False
        for counts in _moves(best, num_ranks, times):
            if counts in tried or trials >= MOST_TRIALS:
                continue
            tried.add(counts)
            trials += 1
            found = _judged(layout.with_counts(counts), schedule, times)
            if found.makespan < best.makespan * (1 - 1e-12) and max(found.peak) <= room:
                best, improved = found, True
                break
    return best


def _schedule(layout: MegatronLayout, num_ranks: int, num_microbatches: int) -> Schedule:
    if len(layout.stages) == num_ranks:
        return build("1f1b", num_ranks, num_microbatches)
    return build("interleaved-1f1b", num_ranks, num_microbatches, num_stages=len(layout.stages))


def _judged(layout: MegatronLayout, schedule: Schedule, times: LayerTimes) -> SimulatedLayout:
    timeline = simulate(schedule, times.costs(layout))
    return SimulatedLayout(
        layout,
        timeline.makespan,
        timeline.bubble_ratio,
        timeline.busy,
        timeline.peak_activations,
    )


def _moves(judged: SimulatedLayout, num_ranks: int, times: LayerTimes) -> Iterator[tuple[int, ...]]:
    """Counts of blocks with one moved, the likeliest first: from costly stages and busy ranks to others."""
    counts = judged.layout.counts
    f = times.costs(judged.layout).f
    last = next((s for s, stage in enumerate(judged.layout.stages) if "m" in stage), len(counts) - 1)

    def weight(stage: int) -> tuple[float, float]:
        return judged.busy[stage % num_ranks], f[stage]

    for giver in sorted((s for s in range(len(counts)) if counts[s]), key=weight, reverse=True):
        for taker in sorted(range(last + 1), key=weight):
            if taker != giver:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
