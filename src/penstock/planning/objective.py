"""What a plan is to make small: the makespan, the span, or the expected makespan over link delays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cost import CostError, Links
from penstock.schedule import ScheduleError
from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class Expected:
    """The mean makespan over samples of link delays.

        Expected.drawn(lambda random: ps.Links({(0, 1): random.expovariate(1 / 20)}), num_samples=32, seed=0)

    Attributes:
        samples: delays, each as likely as the others.

    Raises:
        CostError: no sample.

    Examples:
        >>> import penstock as ps
        >>> late = ps.planning.Expected([ps.Links({(0, 1): delay}) for delay in (0.0, 20.0)])
        >>> plan = ps.plan(ps.Costs.uniform(2, f=10, i=10, w=10), 2, 4, objective=late, time_limit=0.5)
        >>> plan.lower_bound <= plan.value
        True
    """

    samples: Sequence[Links]

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))
        if not self.samples:
            raise CostError("an expected makespan needs at least one sample of link delays")
        if wrong := next((sample for sample in self.samples if not isinstance(sample, Links)), None):
            raise CostError(f"a sample of link delays is {wrong!r}: give ps.Links")
        for sample in self.samples:
            sample.require_constant("a sample of link delays")

    @classmethod
    def drawn(cls, draw: Callable[[random.Random], Links], num_samples: int = 16, seed: int = 0) -> Expected:
        """Samples from a distribution: `draw` makes one from a source of random numbers."""
        if num_samples < 1:
            raise CostError(f"num_samples is {num_samples}: an expected makespan needs at least 1")
        source = random.Random(seed)
        return cls([draw(source) for _ in range(num_samples)])


def read_objective(value: Any) -> str | Expected:
    """Raises ScheduleError unless it is "makespan", "span" or an `Expected`."""
    if isinstance(value, Expected) or value in ("makespan", "span"):
        return value
    raise ScheduleError(f"objective {value!r}: give 'makespan', 'span' or ps.planning.Expected(...)", rule="options")
