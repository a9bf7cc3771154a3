"""The result of planning: a schedule, and how good it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from penstock.planning.family import Certificate
from penstock.planning.progress import gap
from penstock.schedule import Schedule, picture
from penstock.schedule.channels import BUFFERED
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Timeline


@dataclass(frozen=True)
class Plan:
    """A schedule and how good it is.

    Attributes:
        schedule: the schedule, which is checked and confirmed by simulation. It has its messages as ops if it was
            planned for a channel.
        makespan: its makespan under the given links, on the channel of the certificate (ms).
        value: its value of the objective (ms): the makespan, the span, or the mean makespan.
        lower_bound: no schedule that the certificate covers has a smaller value within the limits (ms).
        certificate: the family of schedules that the bound covers.
        seconds: how long the search took.
        how: what found the schedule: "greedy", "in step", the name of a library schedule, "building block",
            "justified", "local search" or "exact"; if stages are shared or streams are planned, also "serial",
            "plan" or "ends". After a library schedule's name, ", recomputed" means that forwards run
            again. ", paired" means that the plan has pairs.
        timeline: when each op runs, under the given costs and links.
        microbatch_order: if microbatches differ, the order of microbatches that the schedule declares; else None.

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
        """Writes the schedule (.json, .txt, .csv) or a picture of its timeline (.svg, .html), by the ending."""
        if Path(path).suffix == ".csv" and self.certificate.channel != BUFFERED:
            import_module("penstock.formats").save(self.schedule, path, channels=self.certificate.channel)
        else:
            picture.save_either(self.schedule, self.timeline, path)

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()

    @property
    def gap(self) -> float:
        """`value / lower_bound - 1`: the plan is at most this far from the best schedule of its family."""
        return gap(self.value, self.lower_bound)
