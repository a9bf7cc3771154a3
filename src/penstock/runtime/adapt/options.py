"""`AdaptOptions`: whether and how a run adapts to slow links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.control import Prices
from penstock.control.configuration import with_host_copies
from penstock.cost import Costs, Ring
from penstock.dispatch import Dispatch
from penstock.runtime.errors import RuntimeFailure, is_amount, is_number, require_value
from penstock.schedule.short_repr import short_repr
from penstock.simulation.simulator import as_dispatch
from penstock.unknown_names import refuse_unknown


@refuse_unknown(RuntimeFailure)
@dataclass(frozen=True)
class AdaptOptions:
    """How a run measures its links, and switches to another schedule, dispatch or set of delegated links.

    Attributes:
        folder: where the log and the records of the run are written. None: nowhere.
        store: the address of the Redis through which ranks report: redis://HOST:PORT/DB. None: a store of torch's in
            rank 0's process.
        costs: costs of each stage. None: those given to `ps.emulate`, or measured in the first iterations.
        memory_limit: most activations that each rank may hold, in the unit of the costs: one number, or one per rank.
            None: what each rank holds in the first schedule's own order.
        host_memory: the most activations of a rank that may wait in host memory while some link is delegated, in the
            same unit: one number, or one per rank. A schedule that needs more than `memory_limit` then has OFFLOAD
            and RELOAD ops, which move them.
        host_copy_ms: how long one unit of activation takes to host memory, and back (ms). None: bytes move at
            25 GB/s, and other units take as long as the stage's forward; see
            `penstock.control.configuration.with_host_copies`. OFFLOAD and RELOAD in `costs.other` go before it.
        dispatches: the dispatches that may be chosen. Hinted dispatch is chosen only if it is listed here.
        may_replan: whether the order of ops may change.
        may_delegate: whether slow links may be given to delegates. With `transport="delegate"` all of them are.
        may_move: whether nodes of a mesh with replicas may change places if links between them are late. Stages and
            optimizer must then be given as functions, which are called again.
        ring: how the rings that add up gradients move bytes. The cost of a late link in a ring is predicted with it.
        prices: what a switch costs.
        least_gain: share of the iteration time, 0 to 1, that a switch must save.
        least_delay: the smallest delay, and the smallest change of a delay, that matters (ms). None: a tenth of the
            mean op.
        patience: how long the store may be out of reach (seconds). After that the run continues without adapting.

    Raises:
        RuntimeFailure: a value of another type, or out of its range.
        ScheduleError: an unknown dispatch.

    Examples:
        >>> import penstock as ps
        >>> options = ps.AdaptOptions(least_gain=0.05, may_move=False)
        >>> options.dispatches
        (<Dispatch.FROZEN: 'frozen'>, <Dispatch.DYNAMIC: 'dynamic'>)

    References:
        PipeMorph (NSDI 2026), sections 4 to 6: answering and detecting slow links.
    """

    folder: str | Path | None = None
    store: str | None = None
    costs: Costs | None = None
    memory_limit: float | Sequence[float] | None = None
    host_memory: float | tuple[float, ...] = 0.0
    host_copy_ms: float | None = None
    dispatches: tuple[Dispatch | str, ...] = (Dispatch.FROZEN, Dispatch.DYNAMIC)
    may_replan: bool = True
    may_delegate: bool = True
    may_move: bool = True
    ring: Ring = field(default_factory=Ring)
    prices: Prices = field(default_factory=Prices)
    least_gain: float = 0.02
    least_delay: float | None = None
    patience: float = 30.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for dispatch in self.dispatches:
            as_dispatch(dispatch)
        for name in ("memory_limit", "host_memory"):
            value = getattr(self, name)
            each = value if isinstance(value, (list, tuple)) else [0.0 if value is None else value]
            fits = all(is_number(number) and number >= 0 for number in each)
            require_value(fits, name, value, "a number of at least 0, or one per rank")
        fits = is_number(self.least_gain) and 0 <= self.least_gain <= 1
        require_value(fits, "least_gain", self.least_gain, "a share of the iteration time, from 0 to 1")
        for name in ("least_delay", "host_copy_ms"):
            value = getattr(self, name)
            require_value(value is None or is_amount(value), name, value, "milliseconds, at least 0, or None")
        require_value(is_amount(self.patience) and self.patience > 0, "patience", self.patience, "seconds, above 0")

    def with_host_copies(self, costs: Costs) -> Costs:
        """The costs, with the time of copies to host memory if activations may wait there."""
        return with_host_copies(costs, self.host_copy_ms) if self.host_memory else costs
