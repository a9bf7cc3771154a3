"""The result of planning: a schedule, how good it is, and the family of schedules in which it is that good.

A search says by `Progress` where it stands, and `certain` and `confirmed` hold its claims against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from penstock.engine.tolerance import EPSILON, slack
from penstock.program import placements
from penstock.schedule import Placement, Schedule, ScheduleError, StageGraph, picture
from penstock.schedule.messages import BUFFERED
from penstock.schedule.short_repr import short_repr
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


def certain(lower_bound: float, value: float, shift: float = 0.0) -> float:
    """The bound, cut to the value of a schedule where rounding alone puts it above.

    Args:
        shift: ms that both are above what the user sees.

    Raises:
        ScheduleError: the bound is above the value by more than rounding, so that one of the two is wrong.
    """
    if lower_bound > value + slack(value):
        raise ScheduleError(
            f"the lower bound is {lower_bound - shift!r} ms, but a schedule takes {value - shift!r} ms, so one of "
            f"the two is wrong (rule: bound)",
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
            f"the plan says {value!r} ms, its simulation {found!r} ms (rule: confirmed)", rule="confirmed"
        )
    return found


@dataclass(frozen=True)
class Certificate:
    """Which family of schedules a plan's lower bound covers: none of them has a smaller value, others may.

    Each stage runs its ops of a kind in the order of microbatches, as `check` demands, or in one that the schedule
    declares where `order` is "any".

    Attributes:
        placement: which rank hosts which stage; shared stages run on all their ranks at once.
        backward: "split" where every backward is I and W, "whole" where it is B, "any" where each is one of the two.
        microbatches: how they are dealt to the pipelines; "in turn" is round robin, "any" every other way too.
        recompute: "any" where forwards may run again or not, each by itself; "none" where none does.
        offload: "any" where each activation may wait in host memory or not; "none" where none does.
        stages: how they depend on one another, None for a chain.
        pairs: "any" where a forward and a backward of another microbatch may run as one or not; "none" where none do.
        order: of the microbatches on a stage: "as numbered", or "any", as where they differ (`Costs.uneven`).
        channel: what carries the messages, see `schedule.messages`.

    Examples:
        >>> import penstock as ps
        >>> plan = ps.plan(ps.Costs.uniform(2, f=10, i=10, w=10), num_ranks=2, num_microbatches=4)
        >>> plan.certificate.backward, plan.certificate.recompute
        ('any', 'any')
    """

    placement: Placement
    backward: str
    microbatches: str = "in turn"
    recompute: str = "none"
    offload: str = "none"
    stages: StageGraph | None = None
    pairs: str = "none"
    order: str = "as numbered"
    channel: str = BUFFERED

    __repr__ = short_repr

    def __str__(self) -> str:
        """`placement one-to-one, backward split (I and W), no recompute, no offload`"""
        words = [f"placement {_placement_name(self.placement)}"]
        if self.stages is not None:
            if not replace(self.stages, registered=(), needs=()).is_chain:
                words.append(f"stages that branch ({len(self.stages.edges)} edges)")
            if kinds := ", ".join(sorted({each.kind for each in self.stages.registered})):
                words.append(f"ops of your own ({kinds})")
        backward = {
            "split": "backward split (I and W)",
            "whole": "backward whole (B)",
            "any": "each backward split or whole",
        }
        words.append(backward[self.backward])
        words.append("no recompute" if self.recompute == "none" else "each forward run again or not")
        words.append("no offload" if self.offload == "none" else "each activation in host memory or not")
        if self.pairs != "none":
            words.append("a forward and a backward as a pair or not")
        if self.placement.num_pipelines > 1:
            how = "in any way" if self.microbatches == "any" else self.microbatches
            words.append(f"microbatches dealt to pipelines {how}")
        if self.order == "any":
            words.append("microbatches in any order")
        if self.channel != BUFFERED:
            words.append(f"messages over {self.channel}")
        return ", ".join(words)


def _placement_name(placement: Placement) -> str:
    num_ranks, num_stages = len({rank for hosts in placement.pipelines for rank in hosts}), placement.num_stages
    for name in placements.NAMES:
        try:
            there = placements.named(name, num_ranks, num_stages)
        except ScheduleError:  # it has another number of stages
            continue
        if placement == there:
            return f"{name} with {num_stages} stages" if name.startswith(("circular", "wave")) else name
    pipelines = "" if placement.num_pipelines == 1 else f" in {placement.num_pipelines} pipelines"
    shared = f", {len(placement.shared)} of them shared" if placement.shared else ""
    return f"as given ({num_stages} stages{pipelines}{shared})"


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
            "justified", "local search" or "exact"; if stages are shared or streams are planned, also "serial"
            or "plan". After a library schedule's name, ", recomputed" means that forwards run
            again. ", paired" means that the plan has pairs.
        timeline: when each op runs, under the given costs and links.
        microbatch_order: if microbatches differ, the order of microbatches that the schedule declares; else None.
        interrupted: whether Ctrl-C ended the search.

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
    interrupted: bool = field(default=False, repr=False, compare=False)

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
