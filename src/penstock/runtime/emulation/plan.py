"""What an emulated run needs to know of a configuration, worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.control import Configuration
from penstock.cost import Costs
from penstock.dispatch import Dispatch, Dispatcher
from penstock.runtime.emulation.backend import EmulatedBackend
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.wiring import Wiring, wire
from penstock.schedule import Schedule
from penstock.simulation.simulator import frozen_caps, memory_changes


@dataclass(frozen=True)
class EmulatedPlan:
    """Attributes:
    configuration: what runs. number: of the decision that it comes from, 0 for the start.
    wiring: of its schedule; change: per op, what it adds to the activations held.
    """

    configuration: Configuration
    wiring: Wiring
    change: Sequence[float]
    number: int = 0

    @property
    def schedule(self) -> Schedule:
        return self.configuration.schedule

    @property
    def dispatch(self) -> Dispatch:
        return self.configuration.dispatch

    def backend(self, costs: Costs, stretch: float) -> EmulatedBackend:
        """What runs a rank's ops."""
        return EmulatedBackend(self.wiring, costs, stretch)

    def worker(self, rank: int, transport: Transport, costs: Costs, stretch: float) -> tuple[Worker, EmulatedBackend]:
        """A rank at the begin of a step, and what runs its ops."""
        backend = self.backend(costs, stretch)
        cap = self.configuration.caps[rank]
        dispatcher = Dispatcher(self.wiring.graph, rank, self.dispatch, self.change, cap)
        return Worker(self.wiring, rank, dispatcher, backend, transport), backend


def plan_of(configuration: Configuration, costs: Costs, number: int = 0) -> EmulatedPlan:
    """Works a configuration out.

    Raises:
        ScheduleError: a cap is below what the schedule's own order needs.
    """
    wiring = wire(configuration.schedule)
    change = memory_changes(wiring.graph, costs)
    frozen_caps(wiring.graph, change, configuration.caps)
    _ = wiring.stations  # here, and not in the first step that runs it
    return EmulatedPlan(configuration, wiring, change, number)
