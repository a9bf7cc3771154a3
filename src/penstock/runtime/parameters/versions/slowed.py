"""Rates by stage: the later a stage's gradients, the lower its learning rate.

    lr / (1 + d)        on a stage of which an update comes at most d updates after the forwards that it gathers

In PipeDream's order with one microbatch a window d is p - k on stage k of p (k from 1): the first stage learns at 1/p
of the rate, the last at all of it. XPipe's prediction goes by the lower rate, too. Weights whose gradients are late
oscillate about where they should be, the wider the higher the rate and the later the gradients.

`pipedream-lr` reads weights as `pipedream` does, `xpipe-lr` as `xpipe`. The quotient for a whole run is ours. Rates
that depend on a stage's delay are those of Yang et al., "PipeMare: asynchronous pipeline parallel DNN training",
2021, where they last for the run's beginning. What was measured stands in `experiments/amdp/delay.py`.
"""

from __future__ import annotations

from penstock.runtime.parameters.versions.pipedream import Stashing
from penstock.runtime.parameters.versions.xpipe import AdamPrediction
from penstock.schedule import Schedule
from penstock.schedule.staleness import updates_ahead


class SlowedStashing(Stashing):
    """Stashing with a lower rate where gradients are late."""

    name = "pipedream-lr"

    def slowed(self, schedule: Schedule, stage: int) -> int:
        return _versions(schedule, stage)


class SlowedPrediction(AdamPrediction):
    """XPipe's prediction with a lower rate where gradients are late."""

    name = "xpipe-lr"

    def slowed(self, schedule: Schedule, stage: int) -> int:
        return _versions(schedule, stage)


def _versions(schedule: Schedule, stage: int) -> int:
    """One more than the updates that a gradient of the stage is late by at most."""
    return 1 + max(updates_ahead(schedule, stage).values(), default=0)
