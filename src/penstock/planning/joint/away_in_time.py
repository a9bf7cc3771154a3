"""Sends activations to host memory without a change of when forwards and backwards run, rank by rank, by CP-SAT.

    given    an order that keeps to both memories of each rank together, and when its ops start
    kept     each F, and each I (or B): so nothing changes for other ranks
    asked    for each rank alone: which activations go, when O and L run on its stream, and where W stands

What `away` does op by op, without a look at the clock, is often enough. Where an order has no room to spare it is
not: W has to give way, and what comes back must be there in time.

A rank is a small problem of its own, so this comes to an answer where CP-SAT over all ranks (`exact`) finds none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from penstock.engine.network import Array
from penstock.planning.joint.exact import Forms, add_chain, limit_rank
from penstock.planning.joint.problem import JointProblem
from penstock.planning.joint.rows import L, O, Orders
from penstock.planning.order_model import ModelOp, OrderModel, TimeGrid

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
    ops = problem.ops
    given = orders.row[r, : orders.length[r]].tolist()
    if len(given) > MOST_ON_RANK or seconds <= 0:
        return None
    chains = range(ops.chain_first[r], ops.chain_first[r + 1])
    moments = [float(ms) for op in given for ms in (start[op], orders.duration[op])]
    ways = [float(ops.times[c, kind]) for c in chains for kind in (O, L)]
    model = OrderModel(TimeGrid.of((*moments, *ways, horizon), horizon, _STEPS))

    def window(op: int) -> tuple[float, float]:
        """An F, I or B stays where it is."""
        return float(start[op]), horizon - float(start[op] + orders.duration[op])

    made: dict[int, ModelOp] = {}
    forms: dict[int, Forms] = {}
    for c in chains:
        add_chain(model, problem, c, window, made, forms, orders)
    limit_rank(model, problem, r)
    answer = model.solve(seconds, seed)
    if not answer.found:
        return False if answer.refuted else None
    # At one moment: ops that take no time, then what is started on the stream, then the op that runs from then on.
    spans = {op: (model.value(made[op].start), model.value(made[op].end)) for op in given}
    found = [(at, 2 if end > at else 0, place, op) for place, (op, (at, end)) in enumerate(spans.items())]
    for op, each in made.items():
        if ops.kind[op] >= O and model.value(each.present):
            at = model.value(each.start)
            # Where the rank runs an op then, before that op.
            begun = next((low for low, high in sorted(spans.values()) if low < at < high), at)
            found.append((begun, 1, at, op))
    return [op for *_, op in sorted(found)]
