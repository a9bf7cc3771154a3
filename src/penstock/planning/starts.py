"""First orders, from which a search begins: by priority, in step, and the library's schedules.

By priority, ranks are listed event by event (`list_by_class`). In step, microbatches begin at even intervals, which
needs no list scheduling, and no machine code:

    rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 ...      each op stands where it would start if a forward and a backward
    rank 1 | .  F0 F1 .  I0 W0 F2 I1 W1 F3 ...      took an even step on every stage and nothing else were in its way

All ranks go by the same moments, which only grow along whatever waits, so nobody can lock up. The longer the
interval, the fewer microbatches are under way at once: the least one is taken with which every rank keeps to its cap,
and at the longest each microbatch is alone. Some columns are sorted a few times, so this takes a second where list
scheduling without machine code takes many. Where ranks host several stages large problems come out shorter so, too:
list scheduling by class lets the ranks fall out of step.

Where a schedule of the library keeps within the caps, the plan is no worse than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.engine import list_by_values
from penstock.engine.compiled import compiled
from penstock.engine.list_by_values import ListSpace
from penstock.engine.network import Array
from penstock.library import build
from penstock.planning.annealing import is_quick
from penstock.planning.bounds import topological, ways
from penstock.planning.problem import Problem, fits
from penstock.planning.search import Search, time_of
from penstock.schedule import Placement, Schedule, ScheduleError, circular, one_to_one, v_shape
from penstock.schedule.placement import bidirectional, multi_directional, wave

SHARES = (0.75, 0.5, 0.6, 0.4)
"""Steps that are tried, as shares of the work of a microbatch on a stage: with a half, a rank with one stage has its
forwards and its backwards half an interval apart, as in 1F1B. Which is best depends on placement and delays."""

_HALVINGS = 8
"""How often the search for the least interval halves its range of logarithms. That leaves some percent of error."""

MOST_OPS = 20_000
"""Above this, building the library's schedules takes longer than it is worth. Where ranks host several stages, orders
in step stand for them."""

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


def greedy(search: Search) -> None:
    """Takes the first order, so that there is a plan however short the time: backward before forward before weight
    gradients. Microbatches go in step if that gets stuck, or if it would take too long without machine code.
    """
    problem, space = search.problem, ListSpace.of(search.problem.queues)
    listed = -1.0
    if is_quick(problem.queues.num_ops):
        listed = list_by_class(problem, problem.priority_class, space)
    if listed >= 0:
        search.take(listed, space.row, "greedy")
    else:
        stepwise(search)


def list_by_class(problem: Problem, classes: Array, space: ListSpace) -> float:
    """List scheduling by class, then by microbatch. The result is in `space.row`."""
    queues = problem.queues
    class_value = classes * (queues.size.max(initial=0) + 1)
    space.values[:] = np.arange(queues.num_ops) + np.repeat(class_value - queues.op_first[:-1], queues.size)
    space.wait[:] = 0.0
    module: Any = compiled(list_by_values)
    return float(module.list_ops(queues, space, False, False))


def stepwise(search: Search) -> None:
    """Takes orders in which microbatches begin at even intervals; the first of them even if no time is left."""
    for row in in_step(search.problem):
        search.take(time_of(search.problem, row), row, "in step")
        if search.closed or search.left <= 0:
            break


def in_step(problem: Problem) -> Iterator[Array]:
    """Orders (queue ids, rank after rank): for each step the one with about the least interval within the caps.

    Where even one microbatch alone is above a cap, they are those of one microbatch alone.
    """
    queues = problem.queues
    if queues.num_ops == 0:
        yield np.empty(0, np.int64)
        return
    place = np.empty(len(queues.rank), np.int64)
    place[topological(queues)] = np.arange(len(queues.rank))
    by_place = np.lexsort((place[problem.queue_of], queues.rank[problem.queue_of]))
    queue, number = problem.queue_of[by_place], problem.number_of[by_place]
    pipeline = np.array(problem.microbatch_pipeline, np.int64)
    microbatch = np.empty(queues.num_ops, np.int64)
    for p in range(problem.placement.num_pipelines):
        mine = queues.pipeline[queue] == p
        microbatch[mine] = np.flatnonzero(pipeline == p)[number[mine]]
    work = float(np.bincount(queues.rank, queues.duration * queues.size).max()) / max(1, len(pipeline))
    is_weight = np.array([kind == "W" for kind in problem.kind])
    rows = [slice(*ends) for ends in zip(queues.row_first[:-1], queues.row_first[1:], strict=True)]

    def at(interval: float, way: Array) -> Array:
        moment = microbatch * interval + way[queue]
        # Stable, so that of two ops at one moment the one stands first that the other may wait for.
        return np.concatenate([queue[row][np.argsort(moment[row], kind="stable")] for row in rows])

    for share in SHARES:
        step = share * work * queues.num_ranks / problem.placement.num_stages
        stepping = queues._replace(duration=np.where(is_weight, queues.duration, step))
        way = np.array(ways(stepping))
        longest = float((way + stepping.duration).max()) + 1.0
        least = max(work, 1e-6 * longest)
        best = at(least, way)
        if not fits(problem, best):
            best = at(longest, way)
            for _ in range(_HALVINGS):
                middle = math.sqrt(least * longest)
                row = at(middle, way)
                if fits(problem, row):
                    best, longest = row, middle
                else:
                    least = middle
        yield best


def named(search: Search) -> None:
    """Takes every library schedule that solves the problem."""
    problem = search.problem
    if problem.queues.num_ops > MOST_OPS:
        if problem.hosts_several:  # elsewhere list scheduling is better
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
