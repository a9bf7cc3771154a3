"""Where a search stands: what it says while it works, the best that it has found, and what it has proved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.engine.tolerance import EPSILON, slack
from penstock.schedule import ScheduleError
from penstock.simulation import Timeline


@dataclass(frozen=True)
class Progress:
    """Where a search stands.

    Attributes:
        how: the step that runs: "greedy", "justified", "local search", "exact".
        seconds: since the start.
        value, lower_bound: of the objective (ms).

    Examples:
        >>> import penstock as ps
        >>> seen, late = [], ps.Links({(0, 1): 20.0})
        >>> plan = ps.plan(ps.Costs.uniform(2, f=10, i=10, w=10), 2, 4, late, progress=seen.append)
        >>> all(each.lower_bound <= each.value for each in seen)
        True
    """

    how: str
    seconds: float
    value: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """`value / lower_bound - 1`."""
        return gap(self.value, self.lower_bound)


def gap(value: float, lower_bound: float) -> float:
    """`value / lower_bound - 1`; 0 where both are 0."""
    if lower_bound <= 0:
        return 0.0 if value <= 0 else float("inf")
    return value / lower_bound - 1


def certain(lower_bound: float, value: float, described: Callable[[], str], shift: float = 0.0) -> float:
    """The bound, cut to the value of a schedule where rounding alone puts it above.

    Args:
        described: the problem in words.
        shift: ms that both are above what the user sees.

    Raises:
        ScheduleError: the bound is above the value by more than rounding, so that one of the two is wrong.
    """
    if lower_bound > value + slack(value):
        raise ScheduleError(
            f"the lower bound is {lower_bound - shift!r} ms, but a schedule takes {value - shift!r} ms, so one of "
            f"the two is wrong (rule: bound). A bug in penstock: please report it with the problem, {described()}",
            rule="bound",
        )
    return min(lower_bound, value)


def measured(timeline: Timeline, goal: str) -> float:
    return timeline.span if goal == "span" else timeline.makespan


def confirmed(goal: str, value: float, timeline: Timeline) -> float:
    """The simulator's value of the objective, which must be the search's."""
    found = measured(timeline, goal)
    if not math.isclose(found, value, rel_tol=EPSILON, abs_tol=EPSILON):
        raise ScheduleError(
            f"the plan says {value!r} ms, its simulation {found!r} ms (rule: confirmed); this is a bug in penstock",
            rule="confirmed",
        )
    return found


P = TypeVar("P", bound=Any)
"""A problem, which `described` says in words."""


@dataclass
class Incumbent(Generic[P]):
    """The best that a search has found, what it has proved, and its time.

    Attributes:
        problem: what to plan.
        lower_bound: ms; `improve_bound` raises it.
        seed: of the random numbers.
        stop_at_gap: the gap that is good enough.
        on_progress: is called with every report.
        began: when the search began, by `clock`.
        until: seconds, since the search began, at which it must have come to its end.
        clock: what says the time, in seconds.
        value: of the best so far (ms); how: the step that found it.
    """

    problem: P
    lower_bound: float
    seed: int = 0
    stop_at_gap: float = 0.0
    on_progress: Callable[[Progress], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    until: float = math.inf
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)
    value: float = math.inf
    how: str = ""

    @property
    def seconds(self) -> float:
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds till the search must have come to its end; below 0 where it should have."""
        return self.until - self.seconds

    @property
    def shift(self) -> float:
        """ms that value and bound are above those of the objective."""
        return 0.0

    @property
    def target(self) -> float:
        """The value (ms) at which the search may stop."""
        return self.shift + (self.lower_bound - self.shift) * (1 + max(self.stop_at_gap, EPSILON))

    @property
    def closed(self) -> bool:
        """Whether the best is proved good enough."""
        return self.value <= self.target

    def improves(self, value: float, how: str) -> bool:
        """Whether a value (ms) is the best so far, which then counts.

        Raises:
            ScheduleError: it is below the bound, so one of the two is wrong.
        """
        if not 0 <= value < self.value * (1 - 1e-12):
            return False
        self.lower_bound = certain(self.lower_bound, value, self.problem.described, self.shift)
        self.value, self.how = float(value), how
        return True

    def report(self, how: str) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(how, self.seconds, self.value - self.shift, self.lower_bound - self.shift))

    def improve_bound(self, bound: float) -> None:
        """Takes a bound if it is the best so far.

        Raises:
            ScheduleError: it is above the value of the best so far.
        """
        self.lower_bound = certain(max(self.lower_bound, bound), self.value, self.problem.described, self.shift)
