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
        number: decisions are numbered from 1.
        iteration: the iteration after which it was made.
        action: what it changes.
        configuration: what is to run.
        reason: why, in words.
        ms_now: iteration time (ms) of what runs now; None where a dead link leaves none. It is simulated under the
            measured links. If the decision takes a change back, it is measured, with the change.
        ms_then: iteration time (ms) of what is to run. If the decision takes a change back, it is measured, before
            the change.
        price: what the switch costs, in ms.
        causes: what the changes that led to it are attributed to: "latency", "bandwidth", "occupancy", "loss",
            "delay" (of a link), "compute" (of a stage's ops); none where nothing had changed.
        peaks: the most activations that each rank holds, simulated under the measured links, in the units of the
            costs.
        in_host: the most activations of each rank that wait in host memory at once, where OFFLOAD ops of the schedule
            move them: at most the job's `host_memory`.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> late = ps.Links.parse("2:3=latency:steps:0ms/0ms,1600ms/60ms")
        >>> run = ps.control.rehearse(ps.control.Controller(job), late, until=8_000)
        >>> decision = run.decisions[0]
        >>> decision.number, decision.ms_then < decision.ms_now
        (1, True)
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
