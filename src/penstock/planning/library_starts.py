"""Library schedules as starts: where one keeps within the caps, the plan is no worse than it."""

from __future__ import annotations

from penstock.engine.memory import peaks
from penstock.engine.tolerance import is_within
from penstock.library import SCHEDULES, build
from penstock.planning.problem import Array, Problem
from penstock.planning.search import Search, time_of
from penstock.schedule import Schedule, ScheduleError

MOST_OPS = 20_000
"""Above this building them all takes longer than it is worth."""


def named(search: Search) -> None:
    """Takes every library schedule that solves the problem."""
    if search.problem.queues.num_ops > MOST_OPS:
        return
    for name in SCHEDULES:
        row = _row_of(search.problem, name)
        if row is not None and fits(search.problem, row):
            value = time_of(search.problem, row)
            if value >= 0:
                search.take(value, row, name)
    search.report("library")


def _row_of(problem: Problem, name: str) -> Array | None:
    placement = problem.placement
    num_ranks, num_microbatches = problem.queues.num_ranks, len(problem.microbatch_pipeline)
    schedule: Schedule | None = None
    for options in ({}, {"num_stages": placement.num_stages}):
        try:
            schedule = build(name, num_ranks, num_microbatches, **options)
        except ScheduleError:
            continue
        if schedule.placement == placement and schedule.stage_graph is None:
            break
    if (
        schedule is None
        or schedule.stage_graph is not None
        or schedule.placement != placement
        or schedule.microbatch_pipeline != problem.microbatch_pipeline
        or {op.kind for row in schedule.order for op in row} != set(problem.kind)
    ):
        return None
    return problem.row(schedule)


def fits(problem: Problem, row: Array) -> bool:
    """Whether fixed orders keep every rank within its cap."""
    queues = problem.queues
    return all(map(is_within, peaks(queues.memory[row], queues.row_first), queues.cap.tolist()))
