"""CP-SAT on problems of any stages: the shortest order of all ops, or of those in a window of a sequence.

As `planning.exact`, for rows that share ops and windows of ops that unlock windows. Memory is a reservoir: an op that
takes some begins when there is room for it.

    before | window            | after                      minimise over the freed ops
    -------+-------------------+-----------------           max(start + duration + tail)
    fixed  | in a better order | same order, moved

A freed op may start no earlier than what is before it allows. Once it has ended, at least the longest way through
what is after it is still to go (its tail). Above all, windows shorten the warm-up and the cool-down.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.needs import last_needed
from penstock.engine.tolerance import EPSILON
from penstock.planning.exact import ROUGH_STEPS, STOPPING, TimeGrid, answered, clock_of, memory_scale, solver_of
from penstock.planning.graph.bounds import heads_and_tails, memory_waits
from penstock.planning.graph.problem import GraphProblem
from penstock.planning.threads import MOST_THREADS, num_cores

if TYPE_CHECKING:
    from penstock.planning.graph.search import GraphSearch

MOST_OPS = 2_000
"""Ops above which CP-SAT finds nothing in the time that local search needs, if all are freed."""
_FIRST_WINDOW, _LARGEST_WINDOW = 64, 384
_SLICE = 2.0
"""Seconds for one window, at most."""
_NEAR_WHOLE = 1e-6


def lessen(search: GraphSearch, until: float) -> None:
    """Asks for the least makespan until `until` (seconds since the search began): first in few steps of time, which
    closes in on it, then in more, which proves it."""
    num_ops = search.problem.num_ops
    for num_steps in ROUGH_STEPS if num_ops <= MOST_OPS else ():
        left = until - STOPPING - search.seconds
        if search.closed or left <= 0:
            return
        sequence, bound = _shortened(search, search.sequence, 0, num_ops, num_steps, left)
        search.take(sequence, "exact")
        search.improve_bound(bound)
        search.report(search.how)


def shorten_windows(search: GraphSearch, until: float) -> None:
    """Frees window after window, both ends first, larger ones where no window of a size helps any more."""
    problem, size = search.problem, _FIRST_WINDOW
    sequence, best = search.sequence, search.value
    while size <= _LARGEST_WINDOW:
        improved = False
        for first in _windows(problem.num_ops, size):
            left = until - search.seconds
            if search.closed or left <= STOPPING:
                return
            steps, last = ROUGH_STEPS[0], min(first + size, problem.num_ops)
            found, _ = _shortened(search, sequence, first, last, steps, min(left, _SLICE))
            value, start = problem.placed(found)
            if 0 <= value <= best:  # another order of the same length may let the next window shorten it
                improved |= search.take(found, "ends")
                sequence, best = problem.sorted_by_start(found, start), value
        if not improved:
            if size >= problem.num_ops:
                break
            size *= 2


def _windows(num_ops: int, size: int) -> list[int]:
    """Where windows begin: at both ends first, and then, with overlap, from both ends to the middle."""
    last = max(0, num_ops - size)
    places: list[int] = []
    for offset in range(0, last // 2 + 1, max(1, size // 2)):
        places += [place for place in (offset, last - offset) if place not in places]
    return places[:6]


def _shortened(
    search: GraphSearch, sequence: Any, first: int, last: int, num_steps: int, seconds: float
) -> tuple[Any, float]:
    """The sequence with the ops at places `first` to `last - 1` in a better order, if one is found, and a bound (ms)
    on every such sequence."""
    problem = search.problem
    times = {float(ms) for ms in (*problem.network.duration, *problem.more.need_delay)}
    clock = clock_of(times, problem.placed(sequence)[0], num_steps)
    model, begins = _modelled(problem, sequence, clock, first, last)
    solver = solver_of(search.seed, max(2, min(MOST_THREADS, num_cores())))
    solver.parameters.cp_model_probing_level, solver.parameters.symmetry_level = 2, 2
    if answered(solver, model, seconds).name not in ("OPTIMAL", "FEASIBLE"):
        return sequence, 0.0
    order = sorted(
        (solver.value(begin), problem.network.duration[q] > 0, place, q) for place, (q, begin) in enumerate(begins)
    )
    found = np.array(sequence)
    found[first:last] = [q for *_, q in order]
    return found, clock.above(solver.best_objective_bound)


def _modelled(
    problem: GraphProblem, sequence: Any, clock: TimeGrid, first: int, last: int
) -> tuple[Any, list[tuple[int, Any]]]:
    """The model of all sequences that end by the clock's last step, and the start of each freed op."""
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    _, start = problem.placed(sequence)
    heads, tails = heads_and_tails(problem, sequence)
    waits, hosts = memory_waits(problem), [problem.graph.hosts(q) for q in range(problem.graph.num_queues)]
    op_first, ms = problem.network.op_first.tolist(), problem.network.duration.tolist()
    duration = [clock.length(each) for each in ms]
    places = list(zip(np.asarray(sequence).tolist(), problem.ops_of(sequence).tolist(), strict=True))

    def needed(q: int, op: int) -> list[tuple[int, int, float]]:
        """(queue, op, ms late) of all that an op needs."""
        return [
            (source, op_first[source] + last_needed(op - op_first[q], before, after), delay)
            for source, delay, before, after in problem.needs(q)
        ]

    free, rest, held = np.zeros((3, len(problem.cap)))
    for q, op in places[:first]:
        free[hosts[q]] = start[op] + ms[q]
        held[hosts[q]] += problem.takes[q] - problem.gives[q]
    for q, op in reversed(places[last:]):
        tails[op] = max(tails[op], *rest[hosts[q]])
        rest[hosts[q]] = tails[op] + ms[q]
        for _, source, delay in needed(q, op):
            tails[source] = max(tails[source], tails[op] + ms[q] + delay)
    end = model.new_int_var(0, clock.steps, "")
    by_op: dict[int, Any] = {}
    rows: list[list[tuple[int, Any]]] = [[] for _ in problem.cap]
    begins = []
    for q, op in places[first:last]:
        earlier = [(op - 1, duration[q])] if op > op_first[q] else []
        earlier += [
            (op_first[b] + op - op_first[q] - lag, duration[b]) for b, lag in waits[q] if op - lag >= op_first[q]
        ]
        head = max(heads[op], *free[hosts[q]])
        for source, other, delay in needed(q, op):
            earlier.append((other, duration[source] + clock.length(delay)))
            head = head if other in by_op else max(head, start[other] + ms[source] + delay)
        tail = clock.least(max(tails[op], *rest[hosts[q]]))
        begin = by_op[op] = model.new_int_var(clock.least(head), clock.steps - duration[q] - tail, "")
        model.add_hint(begin, clock.length(float(start[op])))
        model.add(end >= begin + duration[q] + tail)
        for other, later in earlier:
            if other in by_op:
                model.add(begin >= by_op[other] + later)
        begins.append((q, begin))
        for row in hosts[q]:
            rows[row].append((q, begin))
    for mine, room in zip(rows, (problem.cap - held).tolist(), strict=True):
        model.add_no_overlap(model.new_fixed_size_interval_var(begin, duration[q], "") for q, begin in mine)
        _limit(model, problem, mine, room, duration)
    model.minimize(end)
    return model, begins


def _limit(model: Any, problem: GraphProblem, row: list[tuple[int, Any]], room: float, duration: list[int]) -> None:
    """Caps what a row holds, or somewhat less than that: no order that keeps to the cap is ruled out."""
    takes, gives = problem.takes.tolist(), problem.gives.tolist()
    if sum(takes[q] for q, _ in row) <= room:
        return
    scale = memory_scale([gives[q] for q, _ in row if gives[q] > 0] or [room], room)
    changes = [(begin, math.floor(takes[q] * scale + _NEAR_WHOLE)) for q, begin in row if takes[q] > 0]
    changes += [(begin + duration[q], -math.ceil(gives[q] * scale - _NEAR_WHOLE)) for q, begin in row if gives[q] > 0]
    times, amounts = zip(*changes, strict=True)
    least = sum(amount for amount in amounts if amount < 0)
    model.add_reservoir_constraint(times, amounts, least, math.floor(room * scale * (1 + EPSILON)))
