"""Exact solving by CP-SAT (`order_model`): up to about 800 ops it often proves the best schedule.

The solver is asked for the least makespan, from the best order on: first in few steps of time, which closes in on it,
then in more, which proves it.

Where a rank hosts one stage and its memory is freed at one op alone, its cap is one more need: F(j + M) after the
W (or B) of j.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.planning.order_model import ROUGH_STEPS, STOPPING, ModelOp, OrderModel, TimeGrid
from penstock.planning.problem import Problem
from penstock.planning.search import Search
from penstock.planning.span_objective import Span

if TYPE_CHECKING:
    from penstock.planning.graph.search import GraphSearch

MOST_OPS, MOST_OPS_IF_SEVERAL = 1_000, 500
"""Above this CP-SAT finds and proves nothing in the time that local search needs: the second where ranks host several
stages, or stages branch."""


def lessen(search: Search | GraphSearch, until: float) -> None:
    """Asks for the least makespan, or span, from the best order on, until so many seconds after the search began."""
    until -= STOPPING
    for number, num_steps in enumerate(ROUGH_STEPS):
        began = time.perf_counter()
        left = until - search.seconds
        if search.closed or left <= 0:
            return
        ops = search.op_arrays()
        times = (float(ms) for ms in (*ops.duration, *ops.delay))
        model = OrderModel(TimeGrid.of(times, search.value, num_steps))
        made = model.add_ops(ops)
        for op, ms in zip(made, search.start().tolist(), strict=True):
            model.hint(op, ms)
        makespan = model.minimize(made)
        if isinstance(search, Search) and search.span is not None and not search.span.fixed:
            _count_from_first_starts(model, search.problem, search.span, made, makespan)
        answer = model.solve(left - (time.perf_counter() - began), search.seed + number, probes=True)
        if answer.found:
            search.take_start(np.array([model.value(op.start) for op in made]), "exact")
        if answer.found or answer.refuted:
            search.improve_bound(answer.bound)
        search.report("exact")


def _count_from_first_starts(
    model: OrderModel, problem: Problem, span: Span, made: list[ModelOp], makespan: Any
) -> None:
    """A rank ends in time after its own first start, which is one of those it may begin with.

    Where nothing can hold that one up it starts at once. Where times are rounded down the difference may come out a
    step too long: that step is given back.
    """
    queues, grid, asked = problem.queues, model.grid, model.model
    for r, firsts in enumerate(span.firsts):
        if not firsts:
            continue
        begun = model.moment()
        chosen = [model.choice() for _ in firsts]
        asked.add_bool_or(chosen)
        for first, this in zip(firsts, chosen, strict=True):
            start = made[queues.op_first[first.queue]].start
            asked.add(begun <= start)
            asked.add(begun == start).only_enforce_if(this)
            if first.fixed:
                asked.add(start <= grid.most(first.start)).only_enforce_if(this)
        for q in range(queues.rank_first[r], queues.rank_first[r + 1]):
            if queues.size[q] > 0:
                end = made[queues.op_first[q + 1] - 1].end
                asked.add(end - begun <= makespan - grid.length(span.shift) + (0 if grid.exact else 1))
