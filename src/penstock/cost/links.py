"""Links: how late a message between two ranks arrives.

A delay here is pure latency: any number of messages may be under way at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from penstock.cost.errors import CostError
from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class Links:
    """Delays in milliseconds.

    `Links({(0, 1): 20.0})` makes both directions between ranks 0 and 1 late by 20; to tell them apart
    give both, (0, 1) and (1, 0). All other links have the `default`.

    Raises:
        CostError: a negative or non-finite delay, or a link from a rank to itself.
    """

    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    default: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_delay("the default delay", self.default)
        if not isinstance(self.delays, Mapping):
            raise CostError(f"delays are {type(self.delays).__name__}: give them by link, like {{(0, 1): 20.0}}")
        for link, delay in self.delays.items():
            if not (isinstance(link, tuple) and len(link) == 2 and all(isinstance(rank, Integral) for rank in link)):
                raise CostError(f"link {link!r}: name it by its two ranks, like (0, 1)")
            if link[0] == link[1]:
                raise CostError(f"link {link[0]}:{link[1]} joins a rank to itself; name two ranks")
            _check_delay(f"the delay of link {link[0]}:{link[1]}", delay)
        object.__setattr__(self, "delays", dict(self.delays))

    def delay(self, source: int, target: int) -> float:
        """Milliseconds from the end of an op on `source` to its message's arrival on `target`."""
        there = self.delays.get((source, target))
        if there is not None:
            return float(there)
        return float(self.delays.get((target, source), self.default))

    def check_ranks(self, num_ranks: int) -> None:
        """Raises CostError for a link that names a rank which is not there."""
        for a, b in self.delays:
            if not (0 <= a < num_ranks and 0 <= b < num_ranks):
                raise CostError(f"link {a}:{b}: ranks go from 0 to {num_ranks - 1}")


def _check_delay(name: str, delay: object) -> None:
    if not isinstance(delay, Real) or not 0 <= float(delay) < math.inf:
        raise CostError(f"{name} is {delay!r}: give milliseconds of at least 0")
