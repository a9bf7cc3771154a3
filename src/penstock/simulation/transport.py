"""What a sender may hand to a link before it must stand still."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost import CostError
from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class Decoupled:
    """Messages never hold up the rank that sends them."""


@dataclass(frozen=True)
class Blocking:
    """A link holds at most `depth` messages under way; its sender then stands still until one arrives.

    This is the head-of-line blocking of the PipeMorph paper, section 3.2: while a link is slow its queue
    fills, and the next send keeps later compute from starting although it is ready.

    Attributes:
        delegated: links, by their two ranks in either order, whose messages go through delegates: decoupled.
    """

    depth: int = 2
    delegated: frozenset[tuple[int, int]] = frozenset()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise CostError(f"a blocking link of depth {self.depth} can carry nothing: give at least 1")

    def depth_of(self, source: int, target: int) -> int:
        """How many messages a direction holds under way; 0 for any number."""
        return 0 if {(source, target), (target, source)} & self.delegated else self.depth


Transport = Decoupled | Blocking


def as_transport(value: Transport | str) -> Transport:
    """Reads "decoupled" or "blocking". Raises CostError."""
    if isinstance(value, Decoupled | Blocking):
        return value
    if value == "decoupled":
        return Decoupled()
    if value == "blocking":
        return Blocking()
    raise CostError(f"transport {value!r}: give 'decoupled', 'blocking' or ps.Blocking(depth=2)")
