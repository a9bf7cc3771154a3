"""What a planner says while it works."""

from __future__ import annotations

from dataclasses import dataclass


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
    return max(0.0, value / lower_bound - 1)
