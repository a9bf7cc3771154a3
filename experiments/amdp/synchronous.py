"""The best there is without mismatch: synchronous schedules window after window, no barrier between them.

A stage goes on with the next window as soon as its own update is done (`ps.passes.repeat_windows`). Of those of the
library, frozen in their own order or in the one that dynamic dispatch takes, the fastest by simulation; ranks may
hold as many activations as AMDP's fullest does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import penstock as ps
from experiments.amdp.methods import Trial, num_windows, simulate, trial_of
from experiments.amdp.setups import Setup

SPLIT = {"backward": "split"}
LIBRARY: Mapping[str, Mapping[str, str]] = {
    "1f1b": {},
    "interleaved-1f1b": {},
    "zb-h1": {},
    "zb-v": {},
    "dualpipe": {},
    "chimera": SPLIT,
    "bitpipe": SPLIT,
    "vchimera": SPLIT,
}


def best_synchronous(setup: Setup) -> Trial:
    """The fastest at a setup; its `method` says which it is."""
    amdp = trial_of("amdp", setup)
    within = max(simulate(amdp).peak_activations)
    return max(_orders(setup, within), key=lambda trial: trial.ktokens(simulate(trial)))


def _orders(setup: Setup, within: float) -> Iterator[Trial]:
    for name, options in LIBRARY.items():
        try:
            one = ps.build(name, setup.num_ranks, setup.window, **options)
        except ps.ScheduleError:  # not for so few microbatches
            continue
        schedule = ps.passes.repeat_windows(one, num_windows(setup.window, setup.num_ranks))
        costs = setup.costs(schedule.num_stages, schedule.placement.num_pipelines)
        for dispatch in ("frozen", "dynamic"):
            timeline = ps.simulate(schedule, costs, links=setup.links, dispatch=dispatch)
            if max(timeline.peak_activations) <= within * (1 + 1e-9):
                yield Trial(name, timeline.executed(), costs, setup.links, setup.window, setup.tokens)
