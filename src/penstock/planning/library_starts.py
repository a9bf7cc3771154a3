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
    """The library schedule in whichever of its forms solves the problem: whole or split, with so many stages."""
    placement = problem.placement
    num_ranks, num_microbatches = problem.queues.num_ranks, len(problem.microbatch_pipeline)
    num_stages = placement.num_stages
    for options in (
        {},
        {"num_stages": num_stages},
        {"backward": "split"},
        {"waves": num_stages // (2 * num_ranks)},
        {"waves": num_stages // (2 * num_ranks), "backward": "split"},
    ):
        try:
            schedule = build(name, num_ranks, num_microbatches, **options)
        except ScheduleError:
            continue
        if _solves(problem, schedule):
            return problem.row(schedule)
    return None


def _solves(problem: Problem, schedule: Schedule) -> bool:
    return (
        schedule.stage_graph is None
        and schedule.placement == problem.placement
        and schedule.microbatch_pipeline == problem.microbatch_pipeline
        and {op.kind for row in schedule.order for op in row} == set(problem.kind)
    )


def fits(problem: Problem, row: Array) -> bool:
    """Whether fixed orders keep every rank within its cap."""
    queues = problem.queues
    return all(map(is_within, peaks(queues.memory[row], queues.row_first), queues.cap.tolist()))
