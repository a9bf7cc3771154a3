"""Chooses the dispatch of `--dispatch auto` again, by what the first steps of a run took.

When a run begins, its costs are only assumed. After some passes the ops of a few more are measured: the mean of each
kind on each stage, and how much ops of a kind vary. The fastest dispatch is chosen by simulation of these, and all
processes change to it before the next step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from penstock.dispatch import Dispatch
from penstock.runtime import Pipeline
from penstock.runtime.execute.timeline import measured_costs
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.simulation.auto import WITHOUT_WAITING, PolicyChoice, choose_policy

FIRST_MEASURED, NUM_MEASURED = 2, 4
"""Passes that are left out after a run began or resumed, in which memory is allocated and channels are set up; and
how many are measured then.
"""


class MeasuredDispatch:
    """Measures some passes, then changes the dispatch of a pipeline, once.

    Attributes:
        notice: what was chosen, in words; empty before that.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._num_passes = 0
        self._timelines: list[Timeline] = []
        self.notice = ""

    def after_pass(self) -> Dispatch | None:
        """To be called by every process after each pass. Returns the dispatch when it has been chosen."""
        number, self._num_passes = self._num_passes, self._num_passes + 1
        if not FIRST_MEASURED <= number < FIRST_MEASURED + NUM_MEASURED:
            return None
        self._timelines.append(self._pipe.timeline())
        if len(self._timelines) < NUM_MEASURED:
            return None
        mine = self._simulated() if self._pipe.rank == 0 else None
        self._timelines.clear()
        # Replicas measure different times: all go by those of the first.
        name, saved = next(found for found in self._pipe.gather(mine) if found is not None)
        chosen, before = Dispatch(name), self._pipe.dispatch
        if chosen is not before:
            self._pipe.reconfigure(replace(self._pipe.configuration, dispatch=chosen))
        self.notice = (
            f"dispatch {chosen} was chosen over the times of passes {FIRST_MEASURED + 1} to {number + 1}, "
            f"{'as before' if chosen is before else f'{before} before'}; simulated {saved:.1%} below frozen"
        )
        return chosen

    def _simulated(self) -> tuple[str, float]:
        """The fastest dispatch, and the share of time that it saves over frozen."""
        found = choose_measured(self._pipe.schedule, self._timelines)
        saved = 1 - found.means[str(found.policy)] / found.means[str(Dispatch.FROZEN)]
        return found.policy.dispatch.value, saved


def choose_measured(schedule: Schedule, timelines: Sequence[Timeline]) -> PolicyChoice:
    """The fastest dispatch over the costs of measured steps, with their jitter. Nothing is known of links."""
    return choose_policy(
        schedule, measured_costs(timelines), jitter=measured_jitter(timelines), policies=WITHOUT_WAITING
    )


def measured_jitter(timelines: Sequence[Timeline]) -> float:
    """Standard deviation of the logarithm of ops' durations about the mean of their kind and stage."""
    found: dict[tuple[str, int], list[float]] = {}
    for timeline in timelines:
        for timed in timeline.ops:
            if (ms := timed.end - timed.start) > 0:
                found.setdefault((timed.op.kind, timed.op.stage), []).append(math.log(ms))
    squares = [(each - middle) ** 2 for of in found.values() for middle in [statistics.fmean(of)] for each in of]
    return math.sqrt(statistics.fmean(squares)) if squares else 0.0
