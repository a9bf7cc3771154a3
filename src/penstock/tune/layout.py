"""Judges a layout of Megatron's by simulation, and finds one with the same number of stages whose step is shorter.

The time of the step counts, and not that of the costliest stage. If a rank has several stages, their sum counts too,
and so does the time to fill and drain the pipeline. So blocks are moved from stage to stage as long as the simulated
step becomes shorter. No rank may come to hold more than the fullest rank did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.cost import Costs
from penstock.formats.megatron_layout import LETTERS, MegatronLayout
from penstock.library import build
from penstock.schedule import Schedule
from penstock.simulation import Timeline, simulate
from penstock.tune.errors import TuneError

MOST_TRIALS = 2000
"""Most layouts that are simulated in the search for a better one."""


@dataclass(frozen=True)
class LayerTimes:
    """What one layer of each letter takes for one microbatch, in ms or any other unit.

    Attributes:
        forward: by letter. backward: how many times as long the backward is. Half of it is I, and half W.
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
        """Costs by stage. A stage keeps one activation unit per block and per m."""
        f = [sum(self.forward.get(letter, 0.0) for letter in stage) for stage in layout.stages]
        half = [time * self.backward / 2 for time in f]
        kept = [float(stage.count("t") + stage.count("m")) for stage in layout.stages]
        return Costs(f=f, i=half, w=half, activation=kept)


@dataclass(frozen=True)
class SimulatedLayout:
    """A layout and its simulated step, in the unit of the times. Its activations are counted in blocks."""

    layout: MegatronLayout
    step: Timeline


def judge_layout(layout: MegatronLayout, num_ranks: int, num_microbatches: int, times: LayerTimes) -> SimulatedLayout:
    """The step of a layout under Megatron's schedule: 1F1B if each rank has one stage, interleaved 1F1B if
    it has several.

    Raises:
        ScheduleError: stages that can't be divided evenly among the ranks, or a number of microbatches that is no
            multiple of the ranks.
    """
    layout.check_ranks(num_ranks)
    return _judged(layout, _schedule(layout, num_ranks, num_microbatches), times)


def better_layout(
    layout: MegatronLayout, num_ranks: int, num_microbatches: int, times: LayerTimes
) -> SimulatedLayout:
    """A layout in which blocks have been moved between stages until no move makes the simulated step shorter.

    It has as many stages, and all other layers stay where they are. No rank holds more activations than the fullest
    rank of the given layout. That layout is returned if 2,000 trials find nothing better.
    """
    layout.check_ranks(num_ranks)
    schedule = _schedule(layout, num_ranks, num_microbatches)
    best = _judged(layout, schedule, times)
    room, trials, tried = max(best.step.peak_activations), 0, {best.layout.counts}
    improved = True
    while improved and trials < MOST_TRIALS:
        improved = False
        for counts in _moves(best, num_ranks, times):
            if counts in tried or trials >= MOST_TRIALS:
                continue
            tried.add(counts)
            trials += 1
            found = _judged(layout.with_counts(counts), schedule, times)
            if found.step.makespan < best.step.makespan * (1 - 1e-12) and max(found.step.peak_activations) <= room:
                best, improved = found, True
                break
    return best


def _schedule(layout: MegatronLayout, num_ranks: int, num_microbatches: int) -> Schedule:
    if len(layout.stages) == num_ranks:
        return build("1f1b", num_ranks, num_microbatches)
    return build("interleaved-1f1b", num_ranks, num_microbatches, num_stages=len(layout.stages))


def _judged(layout: MegatronLayout, schedule: Schedule, times: LayerTimes) -> SimulatedLayout:
    return SimulatedLayout(layout, simulate(schedule, times.costs(layout)))


def _moves(judged: SimulatedLayout, num_ranks: int, times: LayerTimes) -> Iterator[tuple[int, ...]]:
    """Numbers of blocks with one block moved, the most promising first: from costly stages and busy ranks to
    others.
    """
    counts = judged.layout.counts
    f = times.costs(judged.layout).f
    last = next((s for s, stage in enumerate(judged.layout.stages) if "m" in stage), len(counts) - 1)

    def weight(stage: int) -> tuple[float, float]:
        return judged.step.busy[stage % num_ranks], f[stage]

    for giver in sorted((s for s in range(len(counts)) if counts[s]), key=weight, reverse=True):
        for taker in sorted(range(last + 1), key=weight):
            if taker != giver:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
