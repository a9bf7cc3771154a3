"""What a planner says while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.tolerance import slack
from penstock.schedule import ScheduleError


@dataclass(frozen=True)
class Progress:
    """Where a search stands.

    Attributes:
        how: the step that runs: "greedy", "justified", "local search", "exact".
        seconds: since the start.
        value, lower_bound: of the objective (ms).
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
