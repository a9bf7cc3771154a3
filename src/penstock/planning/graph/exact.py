"""Exact solving of problems of any stages by CP-SAT: the least makespan, from the best sequence on.

As `planning.exact`, for rows that share ops and windows of ops that unlock windows. Memory is a reservoir: an op that
takes some begins when there is room for it.
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
"""Above this CP-SAT finds nothing in the time that local search needs."""
_NEAR_WHOLE = 1e-6


def lessen(search: GraphSearch, until: float) -> None:
    """Asks for the least makespan until `until` (seconds since the search began): first in few steps of time, which
    closes in on it, then in more, which proves it."""
    problem = search.problem
    until -= STOPPING
    times = {float(ms) for ms in (*problem.network.duration, *problem.more.need_delay)}
    for number, num_steps in enumerate(ROUGH_STEPS):
        if search.closed or search.seconds >= until or problem.num_ops > MOST_OPS:
            return
        clock = clock_of(times, search.value, num_steps)
        model, begins = _modelled(problem, search.sequence, clock)
        solver = solver_of(search.seed + number, max(2, min(MOST_THREADS, num_cores())))
        solver.parameters.cp_model_probing_level, solver.parameters.symmetry_level = 2, 2
        if answered(solver, model, until - search.seconds).name not in ("OPTIMAL", "FEASIBLE"):
            return
        order = sorted(
            (solver.value(begin), problem.network.duration[q] > 0, place, q)
            for place, (q, begin) in enumerate(begins)
        )
        search.take([q for *_, q in order], "exact")
        search.improve_bound(clock.above(solver.best_objective_bound))
        search.report("exact")


def _modelled(problem: GraphProblem, sequence: Any, clock: TimeGrid) -> tuple[Any, list[tuple[int, Any]]]:
    """The model of all schedules that end by the clock's last step, and the start of each op of the sequence."""
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    _, start = problem.placed(sequence)
    heads, tails = heads_and_tails(problem, sequence)
    waits = memory_waits(problem)
    first = problem.network.op_first.tolist()
    duration = [clock.length(float(ms)) for ms in problem.network.duration]
    last = model.new_int_var(0, clock.steps, "")
    by_op: list[Any] = [None] * problem.num_ops
    rows: list[list[tuple[int, Any]]] = [[] for _ in problem.cap]
    begins = []
    for q, op in zip(np.asarray(sequence).tolist(), problem.ops_of(sequence).tolist(), strict=True):
        number = op - first[q]
        begin = model.new_int_var(clock.least(heads[op]), clock.steps - duration[q] - clock.least(tails[op]), "")
        model.add_hint(begin, clock.length(float(start[op])))
        model.add(last >= begin + duration[q])
        needed = [
            (first[source] + last_needed(number, before, after), duration[source] + clock.length(delay))
            for source, delay, before, after in problem.needs(q)
        ]
        needed += [(first[back] + number - lag, duration[back]) for back, lag in waits[q] if number >= lag]
        if number:
            needed.append((op - 1, duration[q]))
        for source, later in needed:
            model.add(begin >= by_op[source] + later)
        by_op[op] = begin
        begins.append((q, begin))
        for row in problem.graph.hosts(q):
            rows[row].append((q, begin))
    for mine, cap in zip(rows, problem.cap.tolist(), strict=True):
        model.add_no_overlap(model.new_fixed_size_interval_var(begin, duration[q], "") for q, begin in mine)
        _limit(model, problem, mine, cap, duration)
    model.minimize(last)
    return model, begins


def _limit(model: Any, problem: GraphProblem, row: list[tuple[int, Any]], cap: float, duration: list[int]) -> None:
    """Caps what a row holds, or somewhat less than that: no order that keeps to the cap is ruled out."""
    takes, gives = problem.takes.tolist(), problem.gives.tolist()
    if sum(takes[q] for q, _ in row) <= cap:
        return
    scale = memory_scale([gives[q] for q, _ in row if gives[q] > 0], cap)
    times, changes = [], []
    for q, begin in row:
        if takes[q] > 0:
            times.append(begin)
            changes.append(math.floor(takes[q] * scale + _NEAR_WHOLE))
        if gives[q] > 0:
            times.append(begin + duration[q])
            changes.append(-math.ceil(gives[q] * scale - _NEAR_WHOLE))
    least = sum(change for change in changes if change < 0)
    model.add_reservoir_constraint(times, changes, least, math.floor(cap * scale * (1 + EPSILON)))
