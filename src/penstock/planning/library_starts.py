"""Library schedules as starts: where one keeps within the caps, the plan is no worse than it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from penstock.library import build
from penstock.planning.building_blocks import hosts_several
from penstock.planning.problem import fits
from penstock.planning.search import Search, stepwise, time_of
from penstock.schedule import Placement, Schedule, ScheduleError, circular, one_to_one, v_shape
from penstock.schedule.placement import bidirectional, multi_directional, wave

MOST_OPS = 20_000
"""Above this building them takes longer than it is worth; where ranks host several stages orders in step stand for
them."""

_WHOLE_OR_SPLIT: tuple[dict[str, Any], ...] = ({}, {"backward": "split"})

Start = tuple[Callable[[int, int], Placement], tuple[dict[str, Any], ...]]
_ONE_TO_ONE: Start = (lambda num_ranks, _: one_to_one(num_ranks), ({},))
_V: Start = (lambda num_ranks, _: v_shape(num_ranks), ({},))

STARTS: dict[str, Start] = {
    "1f1b": _ONE_TO_ONE,
    "gpipe": _ONE_TO_ONE,
    "zb-h1": _ONE_TO_ONE,
    "zb-h2": _ONE_TO_ONE,
    "zb": _ONE_TO_ONE,
    "interleaved-1f1b": (circular, _WHOLE_OR_SPLIT),
    "looped-bfs": (circular, ({},)),
    "zb-v": _V,
    "v-half": _V,
    "v-min": _V,
    "dualpipe-v": _V,
    "hanayo": (lambda num_ranks, num_stages: wave(num_ranks, num_stages // (2 * num_ranks)), _WHOLE_OR_SPLIT),
    "chimera": (lambda num_ranks, _: bidirectional(one_to_one(num_ranks)), _WHOLE_OR_SPLIT),
    "amdp": (lambda num_ranks, _: multi_directional(num_ranks), ({},)),
    "dualpipe": (lambda num_ranks, _: bidirectional(one_to_one(num_ranks)), ({},)),
    "bitpipe": (lambda num_ranks, _: bidirectional(circular(num_ranks, 2 * num_ranks)), _WHOLE_OR_SPLIT),
    "vchimera": (lambda num_ranks, _: bidirectional(v_shape(num_ranks)), _WHOLE_OR_SPLIT),
}
"""Library schedules of a chain without updates: their placement, by the numbers of ranks and stages, and the forms in
which they are built. Where looking at the clock matters the first of them comes first."""


def named(search: Search) -> None:
    """Takes every library schedule that solves the problem."""
    problem = search.problem
    if problem.queues.num_ops > MOST_OPS:
        if hosts_several(problem):  # elsewhere list scheduling is better
            stepwise(search)
        return
    for name, schedule in built(problem.placement, problem.queues.num_ranks, len(problem.microbatch_pipeline)):
        row = problem.row(schedule)
        if row is not None:
            value = time_of(problem, row) if fits(problem, row) else -1.0
            if value >= 0:
                search.take(value, row, name)
        if search.left <= 0:
            break
    search.report("library")


def built(placement: Placement, num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """The library's schedules of a placement, each built when it is asked for, and no others."""
    num_stages = placement.num_stages
    for name, (places, forms) in STARTS.items():
        try:
            if places(num_ranks, num_stages) != placement:
                continue
        except ScheduleError:
            continue  # there is none for these numbers
        counts: dict[str, int] = {}
        if name in ("interleaved-1f1b", "looped-bfs"):
            counts = {"num_stages": num_stages}
        elif name == "hanayo":
            counts = {"waves": num_stages // (2 * num_ranks)}
        for form in forms:
            with suppress(ScheduleError):
                made = build(name, num_ranks, num_microbatches, **counts, **form)
                if made.placement == placement:
                    yield name, made
