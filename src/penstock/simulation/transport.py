"""How many messages a sender may hand to a link before it must wait."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost import CostError
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import refuse_unknown


@dataclass(frozen=True)
class Decoupled:
    """A transport whose messages never make their sender wait.

    Examples:
        >>> import penstock as ps
        >>> late = ps.Links({(0, 1): 20.0})
        >>> ps.simulate(ps.build("1f1b", 2, 4), links=late, transport=ps.simulation.Decoupled()).makespan
        95.0
    """


@refuse_unknown(CostError)
@dataclass(frozen=True)
class Blocking:
    """A transport whose links hold at most `depth` messages. When a link is full, its sender waits.

    This is head-of-line blocking: the queue of a slow link fills up, and the next send keeps later ops from starting
    although they are ready.

    Attributes:
        depth: most messages on their way over a link, in each direction; at least 1.
        delegated: links whose messages go through delegates and block nothing, by their two ranks in either order.

    Raises:
        CostError: a depth below 1.

    Examples:
        >>> import penstock as ps
        >>> s, late = ps.build("1f1b", 4, 8), ps.Links({(0, 1): 8.0})
        >>> ps.simulate(s, links=late).makespan
        81.0
        >>> ps.simulate(s, links=late, transport=ps.Blocking(1)).makespan
        106.0

    References:
        PipeMorph (NSDI 2026), section 3.2.
    """

    depth: int = 2
    delegated: frozenset[tuple[int, int]] = frozenset()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise CostError(f"a blocking link of depth {self.depth} can carry nothing: give at least 1")

    def depth_of(self, source: int, target: int) -> int:
        """How many messages a direction holds; 0 for any number."""
        return 0 if {(source, target), (target, source)} & self.delegated else self.depth


SimulatedTransport = Decoupled | Blocking


def as_transport(value: SimulatedTransport | str) -> SimulatedTransport:
    """Reads "decoupled" or "blocking". Raises CostError for anything else."""
    if isinstance(value, Decoupled | Blocking):
        return value
    if value == "decoupled":
        return Decoupled()
    if value == "blocking":
        return Blocking()
    raise CostError(f"transport {value!r}: give 'decoupled', 'blocking' or ps.Blocking(depth=2)")
