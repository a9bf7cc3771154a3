"""Sends activations to host memory without a change of when forwards and backwards run, rank by rank, by CP-SAT.

    given    an order that keeps to both memories of each rank together, and when its ops start
    kept     each F, and each I (or B): so nothing changes for other ranks
    asked    for each rank alone: which activations go, when O and L run on its stream, and where W stands

What `away` does op by op, without a look at the clock, is often enough. Where an order has no room to spare it is
not: W has to give way, and what comes back must be there in time.

A rank is a small problem of its own, so this comes to an answer where CP-SAT over all ranks (`exact`) finds none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.engine.network import Array
from penstock.planning.exact import answered, common_unit
from penstock.planning.joint.exact import Part, add_cap
from penstock.planning.joint.problem import JointProblem, Orders
from penstock.planning.joint.rows import F, I, L, O, W

MOST_ON_RANK = 400
"""Ops of one rank, above which CP-SAT takes longer than other steps need."""

_STEPS = 1_000_000
"""Parts of a makespan that times are counted in where no unit is found."""


class OffloadSearchResult(NamedTuple):
    """What came of it.

    Attributes:
        orders: no longer than before; None where not all ranks have a row.
        refuted: the rank for which it was proved that there is no row; None where there is none such.
    """

    orders: Orders | None
    refuted: int | None = None


def sent_away_in_time(
    problem: JointProblem, given: Orders, seconds: float, ranks: Sequence[int], seed: int = 0
) -> OffloadSearchResult:
    """Asks for a row of each rank, till one has none.

    Args:
        given: none of it is away or runs again. It need not keep to the cap of each rank alone.
        seconds: that all ranks together may take.
        ranks: all of them, in the order in which they are asked for.
    """
    began = time.perf_counter()
    orders = Orders(*(array.copy() for array in given))
    problem.fits(orders)  # for its forms: it need not be true
    start = np.empty(problem.num_ops)
    horizon = problem.timed(orders, start)
    if horizon < 0:
        return OffloadSearchResult(None)
    for r in ranks:
        row = _row(problem, orders, r, start, horizon, seconds - (time.perf_counter() - began), seed)
        if not isinstance(row, list):
            return OffloadSearchResult(None, None if row is None else r)
        orders.row[r, : len(row)] = row
        orders.length[r] = len(row)
        for op in row:
            if problem.ops.kind[op] == O:
                orders.away[problem.ops.cell[op]] = True
    return OffloadSearchResult(orders)


def _row(
    problem: JointProblem, orders: Orders, r: int, start: Array, horizon: float, seconds: float, seed: int
) -> list[int] | Literal[False] | None:
    """The row of one rank; False where there is none, None where `seconds` were too few to know."""
    from ortools.sat.python import cp_model

    ops = problem.ops
    given = orders.row[r, : orders.length[r]].tolist()
    chains = list(range(ops.chain_first[r], ops.chain_first[r + 1]))
    if len(given) > MOST_ON_RANK or seconds <= 0:
        return None
    moments = {float(t) for op in given for t in (start[op], orders.duration[op])}
    unit = common_unit(moments | {float(ops.times[c, kind]) for c in chains for kind in (O, L)})
    if unit is None or horizon > _STEPS * unit:
        unit = horizon / _STEPS

    def steps(ms: float) -> int:
        return math.floor(ms / unit + 1e-6)

    last = steps(horizon)
    model: Any = cp_model.CpModel()
    starts: dict[int, Any] = {}
    on_rank: list[Any] = []
    for op in given:
        at, end = steps(start[op]), steps(start[op] + orders.duration[op])
        if ops.kind[op] == W:
            at, end = model.new_int_var(0, last, ""), steps(orders.duration[op])
            on_rank.append(model.new_fixed_size_interval_var(at, end, ""))
        else:
            on_rank.append(model.new_fixed_size_interval_var(at, end - at, ""))
        starts[op] = at
    on_stream: list[Any] = []
    held: list[Part] = []
    beside: list[Part] = []
    literals: dict[int, Any] = {}
    for c in chains:
        size, first, amount = int(ops.size[c]), int(ops.first[c]), float(ops.held[c])
        out, back = steps(ops.times[c, O]), steps(ops.times[c, L])
        for j in range(size):
            forward, backward, weight = (first + kind * size + j for kind in (F, I, W))
            there = model.new_bool_var("") if ops.may_away[c] else model.new_constant(0)
            ready, due = steps(start[forward] + orders.duration[forward]), starts[backward]
            end_back = steps(start[backward] + orders.duration[backward])
            if due - ready < out + back:
                model.add(there == 0)
            literals[forward] = there
            away, home = forward + O * size, forward + L * size
            starts[away] = model.new_int_var(ready, max(ready, due - out), "")
            starts[home] = model.new_int_var(ready, max(ready, due - back), "")
            gone, come = model.new_int_var(0, last + out, ""), model.new_int_var(0, last + back, "")
            model.add(gone == starts[away] + out)
            model.add(come == starts[home] + back)
            model.add(starts[home] >= gone).only_enforce_if(there)
            on_stream.append(model.new_optional_fixed_size_interval_var(starts[away], out, there, ""))
            on_stream.append(model.new_optional_fixed_size_interval_var(starts[home], back, there, ""))
            # A rank starts what runs on its stream between its own ops, and room is taken from then on.
            begun = model.new_int_var(ready, max(ready, due - back), "")
            model.add(begun <= starts[home]).only_enforce_if(there)
            model.add(begun >= gone).only_enforce_if(there)
            on_rank.append(model.new_optional_fixed_size_interval_var(begun, 0, there, ""))
            held += [
                (starts[forward], end_back, amount, there.negated()),
                (starts[forward], gone, amount, there),
                (begun, end_back, amount, there),
            ]
            beside.append((starts[away], come, amount, there))
            if not orders.whole[ops.cell[forward]]:
                left = amount * (1.0 - float(ops.freed[c]))
                done = model.new_int_var(0, last, "")
                model.add(done == starts[weight] + steps(orders.duration[weight]))
                model.add(starts[weight] >= end_back)
                if left > 0:
                    held.append((end_back, done, left, None))
            if j:
                model.add(starts[away] >= starts[away - 1])
                model.add(starts[home] >= starts[home - 1])
        weights = [op for op in given if ops.chain[op] == c and ops.kind[op] == W]
        for before, after in pairwise(weights):
            model.add(starts[after] >= starts[before] + steps(orders.duration[before]))
    model.add_no_overlap(on_rank)
    model.add_no_overlap(on_stream)
    add_cap(model, float(ops.cap[r]), held, last)
    add_cap(model, float(ops.host[r]), beside, last)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    status = answered(solver, model, seconds)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return False if status == cp_model.INFEASIBLE else None
    # At one moment: ops that take no time, then what is started on the stream, then the op that runs from then on.
    found = [
        (solver.value(starts[op]), 2 if steps(orders.duration[op]) else 0, place, op)
        for place, op in enumerate(given)
    ]
    bounds = sorted((at, at + steps(orders.duration[op])) for at, _, _, op in found)
    for forward, there in literals.items():
        if solver.value(there):
            size = int(ops.size[ops.chain[forward]])
            for op in (forward + O * size, forward + L * size):
                at = solver.value(starts[op])
                # Where the rank runs an op then, before that op.
                begun = next((low for low, high in bounds if low < at < high), at)
                found.append((begun, 1, at, op))
    return [op for *_, op in sorted(found)]
