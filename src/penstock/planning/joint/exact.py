"""Exact solving by CP-SAT where forms are free: an interval per op, those that a form lacks only where it has them.

Each queue runs in the order of microbatches, as `check` demands. Times are counted in the largest unit of which all
are whole multiples; without one they are rounded down, so that what is refuted is refuted for the true times too, and
an order found is timed again and taken only if it keeps to the caps.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engine.network import NONE
from penstock.engine.tolerance import EPSILON
from penstock.planning.bounds import ways
from penstock.planning.exact import answered, common_unit
from penstock.planning.joint.bounds import relaxed
from penstock.planning.joint.problem import JointProblem, Orders
from penstock.planning.joint.rows import WHOLE, F, I, L, O, R, W

MOST_OPS = 500
"""Above this CP-SAT finds and proves nothing in the time that local search needs."""

_STEPS = 1_000_000
"""Parts of a horizon, and of a cap, that times and memory are counted in where no unit is found."""

_NEAR_WHOLE = 1e-6


@dataclass(frozen=True)
class ExactAnswer:
    """Orders that are shorter, or None; ms that no schedule ends before."""

    orders: Orders | None
    bound: float


def solve(
    problem: JointProblem, best: Orders, value: float, bound: float, seconds: float, seed: int = 0
) -> ExactAnswer:
    """Looks for orders and forms that end before `value` (ms), for at most `seconds`; `best` is where it begins."""
    from ortools.sat.python import cp_model

    began = time.perf_counter()
    ops = problem.ops
    unit = common_unit({float(t) for times in (ops.times.ravel(), ops.delay) for t in times})
    exact = unit is not None and value <= _STEPS * unit
    if unit is None or not exact:
        unit = value / _STEPS
    steps = math.floor(value / unit + _NEAR_WHOLE)

    def length(ms: float) -> int:
        return round(ms / unit) if exact else math.floor(ms / unit * (1 - EPSILON))

    least = relaxed(problem)
    head, tail = ways(least.queues), ways(least.queues.turned())
    queue = least.number
    model: Any = cp_model.CpModel()
    start: dict[int, Any] = {}
    again: dict[int, Any] = {}
    whole: dict[int, Any] = {}
    away: dict[int, Any] = {}
    on_rank: list[list[Any]] = [[] for _ in range(problem.num_ranks)]
    on_stream: list[list[Any]] = [[] for _ in range(problem.num_ranks)]
    held: list[list[Part]] = [[] for _ in range(problem.num_ranks)]
    """Of each rank: from when, till when, how much."""
    beside: list[list[Part]] = [[] for _ in range(problem.num_ranks)]
    """The same of its host memory."""
    back_kind = "I" if problem.forms.split else "B"
    for c, (pipeline, stage) in enumerate(problem.chains):
        r, size, first = int(ops.chain_rank[c]), int(ops.size[c]), int(ops.first[c])
        f, redo, i, w, out, back, b = (length(float(t)) for t in ops.times[c])
        way = {F: queue["F", stage, pipeline], I: queue[back_kind, stage, pipeline]}
        ends: dict[int, Any] = {}
        for j in range(size):
            cell = int(ops.cell_first[c]) + j
            op = [first + kind * size + j for kind in range(ops.num_kinds)]
            again[cell] = model.new_bool_var("") if ops.may_again[c] else 0
            whole[cell] = (model.new_bool_var("") if ops.may_split[c] else 1) if ops.may_whole[c] else 0
            away[cell] = model.new_bool_var("") if ops.may_away[c] else 0
            for kind in range(ops.num_kinds):
                low = length(head[way[kind]]) if kind in way else 0
                high = steps - (length(tail[way[kind]]) if kind in way else 0)
                start[op[kind]] = model.new_int_var(low, max(low, high), "")
            on_rank[r].append(model.new_fixed_size_interval_var(start[op[F]], f, ""))
            long = i + (b - i) * whole[cell]
            back_end = start[op[I]] + long
            finish = model.new_int_var(0, steps, "")
            model.add(finish == back_end)
            on_rank[r].append(model.new_interval_var(start[op[I]], long, finish, ""))
            model.add(start[op[I]] >= start[op[F]] + f)
            ends[op[I]] = finish
            if ops.may_again[c]:
                on_rank[r].append(model.new_optional_fixed_size_interval_var(start[op[R]], redo, again[cell], ""))
                model.add(start[op[R]] >= start[op[F]] + f).only_enforce_if(again[cell])
                model.add(start[op[I]] >= start[op[R]] + redo).only_enforce_if(again[cell])
            if ops.may_away[c]:
                there = away[cell]
                if ops.may_again[c]:
                    model.add(there + again[cell] <= 1)
                for kind, long in ((O, out), (L, back)):
                    on_stream[r].append(model.new_optional_fixed_size_interval_var(start[op[kind]], long, there, ""))
                    if j:
                        model.add(start[op[kind]] >= start[op[kind] - 1])
                for before, after in (
                    (start[op[F]] + f, start[op[O]]),
                    (start[op[O]] + out, start[op[L]]),
                    (start[op[L]] + back, start[op[I]]),
                ):
                    model.add(after >= before).only_enforce_if(there)
                gone, home = (model.new_int_var(0, steps, "") for _ in range(2))
                """When O and L have ended."""
                model.add(gone == start[op[O]] + out).only_enforce_if(there)
                model.add(home == start[op[L]] + back).only_enforce_if(there)
                beside[r].append((start[op[O]], home, float(ops.held[c]), there))
            end = model.new_int_var(0, steps, "")
            """When the microbatch has left the stage."""
            if ops.may_split[c]:
                if ops.may_whole[c]:
                    present = whole[cell].negated()
                    on_rank[r].append(model.new_optional_fixed_size_interval_var(start[op[W]], w, present, ""))
                    model.add(start[op[W]] >= finish)
                    model.add(end == start[op[W]] + w).only_enforce_if(present)
                    model.add(end == finish).only_enforce_if(whole[cell])
                else:
                    on_rank[r].append(model.new_fixed_size_interval_var(start[op[W]], w, ""))
                    model.add(start[op[W]] >= finish)
                    model.add(end == start[op[W]] + w)
            else:
                model.add(end == finish)
            ends[op[W]] = end
            if j:
                model.add(start[op[F]] >= start[op[F] - 1] + f)
                model.add(start[op[I]] >= ends[op[I] - 1])
                if ops.may_again[c]:  # of one that is not there the start is free: it may stand between the others
                    model.add(start[op[R]] >= start[op[R] - 1])
                if ops.may_split[c]:  # B adds to the weights' gradients too, in its turn
                    since = start[op[W]]
                    if ops.may_whole[c]:
                        since = model.new_int_var(0, steps, "")
                        model.add(since == start[op[I]]).only_enforce_if(whole[cell])
                        model.add(since == start[op[W]]).only_enforce_if(whole[cell].negated())
                    model.add(since >= ends[op[W] - 1])
            if not ops.may_away[c]:
                held[r] += _held(model, problem, c, cell, start, op, again, finish, end, steps)
                continue
            stays = away[cell].negated()
            held[r] += [
                (begin, until, amount, stays)
                for begin, until, amount, _ in _held(model, problem, c, cell, start, op, again, finish, end, steps)
            ]
            held[r].append((start[op[F]], gone, float(ops.held[c]), there))
            held[r] += [
                (start[op[L]] if begin is start[op[F]] else begin, until, amount, there)
                for begin, until, amount, _ in _held(model, problem, c, cell, start, op, {}, finish, end, steps)
            ]
    _messages(model, problem, start, whole, length)
    for r in range(problem.num_ranks):
        model.add_no_overlap(on_rank[r])
        model.add_no_overlap(on_stream[r])
        add_cap(model, float(ops.cap[r]), held[r], steps)
        add_cap(model, float(ops.host[r]), beside[r], steps)
    makespan = model.new_int_var(length(bound), steps, "")
    for c in range(len(ops.size)):
        size, first = int(ops.size[c]), int(ops.first[c])
        if size:
            last = first + (I + 1) * size - 1
            _, _, i, w, _, _, b = (length(float(t)) for t in ops.times[c])
            model.add(makespan >= start[last] + i + (b - i) * whole[int(ops.cell_first[c]) + size - 1])
            if ops.may_split[c]:
                for j in range(size):
                    cell = int(ops.cell_first[c]) + j
                    added = model.add(makespan >= start[first + W * size + j] + w)
                    if ops.may_whole[c]:
                        added.only_enforce_if(whole[cell].negated())
    model.minimize(makespan)
    _hint(model, problem, best, start, (again, whole, away), unit)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = seed
    solver.parameters.cp_model_probing_level = 0  # probing and symmetries take longer than the answer
    solver.parameters.symmetry_level = 0
    solver.parameters.catch_sigint_signal = False
    seconds -= time.perf_counter() - began
    if seconds <= 0:
        return ExactAnswer(None, bound)
    status = answered(solver, model, seconds)
    if status == cp_model.INFEASIBLE:  # only where rounding leaves no room for the best itself
        return ExactAnswer(None, bound)
    if status == cp_model.UNKNOWN:
        return ExactAnswer(None, max(bound, solver.best_objective_bound * unit))
    orders = problem.orders()
    for cell in again:
        orders.again[cell] = bool(solver.value(again[cell])) if not isinstance(again[cell], int) else False
        orders.whole[cell] = bool(solver.value(whole[cell]))
        orders.away[cell] = bool(solver.value(away[cell]))
    for r in range(problem.num_ranks):
        present = [
            op
            for op in np.flatnonzero(ops.rank == r).tolist()
            if not (ops.kind[op] == R and not orders.again[ops.cell[op]])
            and not (ops.kind[op] == W and orders.whole[ops.cell[op]])
            and not (ops.kind[op] >= O and not orders.away[ops.cell[op]])
        ]
        # What goes to host memory or comes back then is started before what the rank itself runs.
        present.sort(key=lambda op: (solver.value(start[op]), ops.kind[op] < O, ops.number[op], ops.kind[op]))
        orders.row[r, : len(present)] = present
        orders.length[r] = len(present)
    return ExactAnswer(orders if problem.fits(orders) else None, max(bound, solver.best_objective_bound * unit))


def _messages(model: Any, problem: JointProblem, start: dict[int, Any], whole: dict[int, Any], length: Any) -> None:
    """An op on another stage starts when what it needs has ended and its message is there."""
    ops = problem.ops
    for op in np.flatnonzero(ops.message_from != NONE).tolist():
        before = int(ops.message_from[op])
        times = ops.times[ops.chain[before]]
        long: Any = length(float(times[ops.kind[before]]))
        if ops.kind[before] == I:
            long = long + (length(float(times[WHOLE])) - long) * whole[int(ops.cell[before])]
        model.add(start[op] >= start[before] + long + length(float(ops.delay[op])))


Part = tuple[Any, Any, float, Any]
"""From when, till when, how much is held, and the literal that says whether; None where it always is."""


def _held(
    model: Any,
    problem: JointProblem,
    c: int,
    cell: int,
    start: dict[int, Any],
    op: list[int],
    again: dict[int, Any],
    finish: Any,
    end: Any,
    steps: int,
) -> list[Part]:
    """What a microbatch holds: some from its F on, the rest from its R on where it has one; I frees a part."""
    ops = problem.ops
    amount, kept = float(ops.held[c]), float(ops.kept[c])
    freed = float(ops.freed[c]) * amount if ops.may_split[c] else 0.0
    stays = amount - freed
    begin = start[op[F]]
    if ops.may_again[c] and again:
        since = model.new_int_var(0, steps, "")
        model.add(since == start[op[F]]).only_enforce_if(again[cell].negated())
        model.add(since == start[op[R]]).only_enforce_if(again[cell])
    else:
        since, kept = begin, amount
    parts = [
        (begin, end, min(kept, stays), None),
        (begin, finish, max(0.0, kept - stays), None),
        (since, end, max(0.0, stays - kept), None),
        (since, finish, amount - max(kept, stays), None),
    ]
    return [part for part in parts if part[2] > 0]


def add_cap(model: Any, cap: float, held: list[Part], steps: int) -> None:
    """Caps what a rank holds, in whole amounts rounded down: no order that keeps to the cap is ruled out."""
    if math.isinf(cap) or sum(amount for _, _, amount, _ in held) <= cap:
        return
    unit = common_unit([round(amount, 12) for _, _, amount, _ in held])
    scale = 1 / unit if unit is not None and cap <= _STEPS * unit else _STEPS / cap
    intervals, demands = [], []
    for begin, end, amount, there in held:
        length = model.new_int_var(0, steps, "")
        intervals.append(
            model.new_interval_var(begin, length, end, "")
            if there is None
            else model.new_optional_interval_var(begin, length, end, there, "")
        )
        demands.append(math.floor(amount * scale * (1 + EPSILON)))
    model.add_cumulative(intervals, demands, math.floor(cap * scale * (1 + EPSILON)))


def _hint(
    model: Any,
    problem: JointProblem,
    best: Orders,
    start: dict[int, Any],
    forms: tuple[dict[int, Any], dict[int, Any], dict[int, Any]],
    unit: float,
) -> None:
    """Gives the solver the best orders so far to begin with.

    Args:
        forms: the literals of again, whole and away.
    """
    times = np.empty(problem.num_ops)
    problem.timed(best, times)
    for op, variable in start.items():
        if best.place[op] >= 0:
            model.add_hint(variable, math.floor(times[op] / unit + _NEAR_WHOLE))
    for chosen, literals in zip((best.again, best.whole, best.away), forms, strict=True):
        for cell, literal in literals.items():
            if not isinstance(literal, int):
                model.add_hint(literal, bool(chosen[cell]))
