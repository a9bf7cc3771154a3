"""Library schedules as starts: where one keeps within the caps, the plan is no worse than it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.engine.memory import peaks
from penstock.engine.network import Array
from penstock.engine.tolerance import is_within
from penstock.library import build
from penstock.planning.problem import Problem
from penstock.planning.search import Search, time_of
from penstock.program.placements import bidirectional, wave
from penstock.schedule import Placement, Schedule, ScheduleError, circular, one_to_one, v_shape

MOST_OPS = 20_000
"""Above this building them takes longer than it is worth."""

_WHOLE_OR_SPLIT: tuple[dict[str, Any], ...] = ({}, {"backward": "split"})

STARTS: dict[str, tuple[Callable[[int, int], Placement], tuple[dict[str, Any], ...]]] = {
    "interleaved-1f1b": (circular, ({},)),
    "looped-bfs": (circular, ({},)),
    "zb-v": (lambda num_ranks, _: v_shape(num_ranks), ({},)),
    "v-half": (lambda num_ranks, _: v_shape(num_ranks), ({},)),
    "v-min": (lambda num_ranks, _: v_shape(num_ranks), ({},)),
    "dualpipe-v": (lambda num_ranks, _: v_shape(num_ranks), ({},)),
    "hanayo": (lambda num_ranks, num_stages: wave(num_ranks, num_stages // (2 * num_ranks)), _WHOLE_OR_SPLIT),
    "chimera": (lambda num_ranks, _: bidirectional(one_to_one(num_ranks)), _WHOLE_OR_SPLIT),
    "dualpipe": (lambda num_ranks, _: bidirectional(one_to_one(num_ranks)), ({},)),
    "bitpipe": (lambda num_ranks, _: bidirectional(circular(num_ranks, 2 * num_ranks)), _WHOLE_OR_SPLIT),
    "vchimera": (lambda num_ranks, _: bidirectional(v_shape(num_ranks)), _WHOLE_OR_SPLIT),
}
"""Library schedules with several stages per rank: their placement, by the numbers of ranks and stages, and the forms
in which they are built."""


def named(search: Search) -> None:
    """Takes every library schedule that solves the problem."""
    if search.problem.queues.num_ops > MOST_OPS:
        return
    for name in STARTS:
        if search.left <= 0:
            break
        for row in _rows_of(search.problem, name):
            value = time_of(search.problem, row) if fits(search.problem, row) else -1.0
            if value >= 0:
                search.take(value, row, name)
    search.report("library")


def _rows_of(problem: Problem, name: str) -> Iterator[Array]:
    num_ranks, num_stages = problem.queues.num_ranks, problem.placement.num_stages
    placement, forms = STARTS[name]
    try:
        if placement(num_ranks, num_stages) != problem.placement:
            return
    except ScheduleError:
        return  # there is none for these numbers
    counts: dict[str, int] = {}
    if name in ("interleaved-1f1b", "looped-bfs"):
        counts = {"num_stages": num_stages}
    elif name == "hanayo":
        counts = {"waves": num_stages // (2 * num_ranks)}
    for form in forms:
        try:
            schedule = build(name, num_ranks, len(problem.microbatch_pipeline), **counts, **form)
        except ScheduleError:
            continue
        if _solves(problem, schedule):
            yield problem.row(schedule)


def _solves(problem: Problem, schedule: Schedule) -> bool:
    return schedule.microbatch_pipeline == problem.microbatch_pipeline and {
        op.kind for row in schedule.order for op in row
    } == set(problem.kind)


def fits(problem: Problem, row: Array) -> bool:
    """Whether fixed orders keep every rank within its cap."""
    queues = problem.queues
    return all(map(is_within, peaks(queues.memory[row], queues.row_first), queues.cap.tolist()))
