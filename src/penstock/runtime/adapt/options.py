"""How a run is to be steered: what the user says, once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.control import Configuration, Job, Prices, Sensitivity
from penstock.cost import Costs, Mesh, Ring
from penstock.dispatch import Dispatch
from penstock.runtime.errors import RuntimeFailure
from penstock.schedule.short_repr import short_repr
from penstock.simulation.simulator import as_dispatch


@dataclass(frozen=True)
class AdaptOptions:
    """Measure links while training, and change schedule, dispatch and delegated links where that is faster.

    Attributes:
        folder: where the log and the records of the run go; None: nowhere.
        store: through which ranks report: tcp://HOST:PORT or redis://HOST:PORT/DB; None: the job's own TCPStore.
        costs: per stage; None: those given to `ps.emulate`, or measured in the first iterations.
        memory_limit: most activations each rank may hold, in the units of the costs; None: what the first schedule
            holds in its own order, rank by rank.
        host_memory: how much more each rank may hold while some link is delegated.
        may_move: whether nodes of a mesh with replicas may change places, where links between them are late. They can
            where stages and optimizer are given as functions, that make them anew.
        ring: how the rings that add up gradients move bytes, for predicting what a late link costs there.
        dispatches, may_replan, may_delegate: the remedies that may be chosen. Hinted dispatch is one where it is
            given: trials of it have not been judged yet. Links can be delegated only where the transport has
            delegates.
        delegate_ms: what a delegate adds to each message's time.
        prices: of switching.
        least_gain: share of the iteration time that a switch must save.
        least_delay: smallest delay, and change of one, that matters (ms); by default a tenth of the mean op.
        sensitivity: when a link counts as changed.
        patience: seconds that the store may be gone before the run is steered no more.

    Raises:
        RuntimeFailure: a patience that is not above 0.
    """

    folder: str | Path | None = None
    store: str | None = None
    costs: Costs | None = None
    memory_limit: float | Sequence[float] | None = None
    host_memory: float = 0.0
    dispatches: tuple[Dispatch | str, ...] = (Dispatch.FROZEN, Dispatch.DYNAMIC)
    may_replan: bool = True
    may_delegate: bool = True
    may_move: bool = True
    ring: Ring = field(default_factory=Ring)
    delegate_ms: float = 0.0
    prices: Prices = field(default_factory=Prices)
    least_gain: float = 0.02
    least_delay: float | None = None
    sensitivity: Sensitivity = field(default_factory=Sensitivity)
    patience: float = 30.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 < self.patience < math.inf:
            raise RuntimeFailure(f"a patience of {self.patience:g} s: give a number above 0")

    @property
    def may_change(self) -> bool:
        """Whether any remedy may be chosen; where none may, links are measured and records written."""
        return bool(self.dispatches) or self.may_replan or self.may_delegate or self.may_move

    def job(
        self, costs: Costs, start: Configuration, depth: int, has_delegates: bool, mesh: Mesh | None = None
    ) -> Job:
        """What the controller needs to know.

        Args:
            depth: messages that a link holds under way before its sender stands still; 0: any number.
            has_delegates: whether the transport can send a link's messages through delegates.
            mesh: whose nodes may move; the costs then say what gradients weigh.

        Raises:
            ControlError: numbers that make no sense, or caps below what the start needs.
            ScheduleError: an unknown dispatch.
        """
        return Job(
            costs,
            start,
            host_memory=self.host_memory,
            depth=depth,
            delegate_ms=self.delegate_ms,
            prices=self.prices,
            least_gain=self.least_gain,
            dispatches=tuple(as_dispatch(each) for each in self.dispatches),
            may_replan=self.may_replan,
            may_delegate=self.may_delegate and has_delegates,
            least_delay=self.least_delay,
            mesh=mesh,
            ring=self.ring,
        )
