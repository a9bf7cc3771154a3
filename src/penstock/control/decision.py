"""A decision: what is to run next, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from penstock.control.candidate import Action
from penstock.control.configuration import Configuration


@dataclass(frozen=True)
class Decision:
    """What is to run next.

    Attributes:
        number: from 1, one more each time.
        iteration: after which it was made.
        action: what it changes; configuration: what is to run.
        reason: in words.
        ms_now, ms_then: simulated iteration time (ms) under the measured links; now is None where a dead link
            leaves no iteration time. Of a change that is taken back: measured, with it and before it.
        price: of the switch (ms).
        causes: what the changes that led to it are put down to: "latency", "bandwidth", "occupancy", "loss", "delay"
            (of a link), "compute" (of a stage's ops); none where nothing had changed.
        peaks: most activations that each rank holds, simulated under the measured links, in the units of the costs.
        in_host: what of them is above what its device holds, and waits in host memory: at most the job's
            `host_memory`.
    """

    number: int
    iteration: int
    action: Action
    configuration: Configuration
    reason: str
    ms_now: float | None
    ms_then: float
    price: float
    causes: tuple[str, ...] = ()
    peaks: tuple[float, ...] = ()
    in_host: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The decision as a JSON object."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return value | {
            "action": self.action.value,
            "configuration": json.loads(self.configuration.to_json()),
            "digest": self.configuration.digest,
        }
