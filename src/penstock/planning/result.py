"""What planning gives: a schedule, and how good it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.planning.family import Certificate
from penstock.planning.progress import gap
from penstock.schedule import Schedule, picture
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Timeline


@dataclass(frozen=True)
class Plan:
    """A schedule and how good it is.

    Attributes:
        schedule: checked, and confirmed by simulation.
        makespan: ms, under the links given.
        value: ms, of the objective: the makespan, the span, or the mean makespan.
        lower_bound: no schedule that the certificate covers has a smaller value within the limits (ms).
        certificate: the family of schedules that the bound covers.
        seconds: that the search took.
        how: what found it: "greedy", "in step", a library schedule by its name, "building block", "justified", "local
            search" or "exact"; "serial", "repetend" or "ends" where stages are shared; ", recomputed" after a library
            schedule's name says that forwards of it run again, ", paired" that the plan has pairs.
        timeline: when each op runs, under the costs and links given.
        microbatch_order: where microbatches differ, the order of them that the schedule declares; None elsewhere.

    Examples:
        >>> import penstock as ps
        >>> found = ps.plan(ps.Costs.uniform(2), num_ranks=2, num_microbatches=4)
        >>> found.makespan, found.lower_bound, found.gap
        (13.0, 13.0, 0.0)
    """

    schedule: Schedule
    makespan: float
    value: float
    lower_bound: float
    certificate: Certificate
    seconds: float
    how: str
    timeline: Timeline = field(repr=False, compare=False)
    microbatch_order: tuple[int, ...] | None = None

    __repr__ = short_repr

    def save(self, path: str | Path) -> None:
        """Writes the schedule (.json, .txt, .csv), or the picture of its timeline (.svg, .html)."""
        picture.save_either(self.schedule, self.timeline, path)

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()

    @property
    def gap(self) -> float:
        """`value / lower_bound - 1`: the plan is at most this far from the best that its certificate covers."""
        return gap(self.value, self.lower_bound)
