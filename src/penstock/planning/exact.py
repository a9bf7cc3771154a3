"""Exact solving by CP-SAT (`order_model`): up to about 800 ops it often proves the best schedule.

Of a `Problem` the solver is not asked for the least makespan but, for one horizon after another, whether any schedule
ends by then: narrow windows make both answers come sooner. Only where a rank hosts several stages, and of stages that
branch, is it asked for the least, from the best order on and in few steps of time: there it goes on from what it has.

Where a rank hosts one stage and its memory is freed at one op alone, its cap is one more need: F(j + M) after the
W (or B) of j.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.planning.bounds import op_arrays
from penstock.planning.order_model import ROUGH_STEPS, STOPPING, ModelOp, OrderModel, TimeGrid
from penstock.planning.problem import Problem, fits
from penstock.planning.search import Search, time_of
from penstock.planning.span_objective import Span

if TYPE_CHECKING:
    from penstock.planning.graph.search import GraphSearch

MOST_OPS, MOST_OPS_IF_SEVERAL = 1_000, 500
"""Above this CP-SAT finds and proves nothing in the time that local search needs: the second where ranks host several
stages, or stages branch."""

_FIRST_SHARE = 0.005
"""How far below the best the first horizon lies: refuted, it proves that gap."""

_FIRST_SECONDS = 2.0
"""What a question may take at first."""

_NEAR = 1e-3
"""A horizon without an answer this near the bound: it takes more time, not another horizon."""


def lessen(search: Search | GraphSearch, until: float) -> None:
    """Asks for the least makespan, from the best order on, until `until` (seconds since the search began).

    First in few steps of time, which closes in on it, then in more, which proves it. Where several stages of a rank
    share its memory this finds and proves more than questions of one horizon after another.
    """
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
        model.minimize(made)
        answer = model.solve(left - (time.perf_counter() - began), search.seed + number, probes=True)
        if answer.found:
            search.take_start(np.array([model.value(op.start) for op in made]), "exact")
        if answer.found or answer.refuted:
            search.improve_bound(answer.bound)
        search.report("exact")


def solve(search: Search, until: float) -> None:
    """Closes in on the best makespan from both sides, until `until` (seconds since the search began).

    Each question is whether some schedule ends by a horizon between bound and best: a yes is a better schedule, a
    no a better bound. A horizon near the best is asked first; where no answer comes in time, the middle between the
    bound and what was asked, since lower horizons are refuted sooner; when that is near the bound, all over again
    with twice the time.
    """
    seconds, unanswered = _FIRST_SECONDS, float("inf")
    share, seed = _FIRST_SHARE, search.seed
    until -= STOPPING
    while not search.closed and search.seconds < until:
        horizon = max(search.value / (1 + share), search.lower_bound * (1 + EPSILON))
        if unanswered <= horizon:
            horizon = (search.lower_bound + unanswered) / 2
        most = min(until - search.seconds, seconds)
        row, bound = within(search.bounded, horizon, most, seed, search.span)
        seed += 1
        if row is not None:
            before = search.value
            search.take(time_of(search.problem, row), row, "exact")
            unanswered = float("inf") if search.value < before else horizon
        elif bound > 0:
            search.improve_bound(bound)
            if unanswered > search.value:
                share = max(search.stop_at_gap, share / 4) * (1 - 1e-6)
        else:
            unanswered = horizon
        if unanswered < search.lower_bound * (1 + _NEAR):
            unanswered = float("inf")
            seconds *= 2
        search.report("exact")


def within(
    problem: Problem, horizon: float, seconds: float, seed: int = 0, span: Span | None = None
) -> tuple[Array | None, float]:
    """Looks for a schedule that ends by `horizon` (ms), for at most `seconds`.

    With `span`, whose bounded problem is given: for one whose span is at most `horizon` less its shift.

    Returns:
        The order of one that does, or None; and ms that no schedule ends before, 0 where nothing was proved.
    """
    began = time.perf_counter()
    ops = op_arrays(problem)
    model = OrderModel(TimeGrid.of((float(ms) for ms in (*ops.duration, *ops.delay)), horizon))
    made = model.add_ops(ops)
    if span is not None and not span.fixed:
        _first_starts(model, problem, span, made)
    answer = model.solve(seconds - (time.perf_counter() - began), seed)
    row = problem.row_of_starts(np.array([model.value(op.start) for op in made])) if answer.found else None
    runs = row is not None and time_of(problem, row) >= 0 and fits(problem, row)
    return (row if runs else None), answer.bound


def _first_starts(model: OrderModel, problem: Problem, span: Span, made: list[ModelOp]) -> None:
    """A rank must end in time after its own first start, which is one of those it may begin with.

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
                asked.add(end - begun <= grid.steps - grid.length(span.shift) + (0 if grid.exact else 1))
