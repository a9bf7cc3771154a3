"""Exact solving of a `Problem` by CP-SAT (`order_model`): up to about 800 ops it often proves the best schedule.

The solver is not asked for the least makespan but, for one horizon after another, whether any schedule ends by then:
narrow windows make both answers come sooner. Only where a rank hosts several stages is it asked for the least first,
from the best order on and in few steps of time: there it goes on from what it has.

Where a rank hosts one stage and its memory is freed at one op alone, its cap is one more need: F(j + M) after the
W (or B) of j.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.engine.network import NONE, Array
from penstock.engine.tolerance import EPSILON
from penstock.planning.bounds import heads_and_tails, own_tails, waits, work_is_cheap
from penstock.planning.op_arrays import OpArrays
from penstock.planning.order_model import ROUGH_STEPS, STOPPING, ModelOp, OrderModel, TimeGrid
from penstock.planning.problem import Problem, fits
from penstock.planning.search import Search, time_of
from penstock.planning.span_objective import Span

MOST_OPS = 1000
"""Above this CP-SAT finds and proves nothing in the time that local search needs."""

_FIRST_SHARE = 0.005
"""How far below the best the first horizon lies: refuted, it proves that gap."""

_FIRST_SECONDS = 2.0
"""What a question may take at first."""

_NEAR = 1e-3
"""A horizon without an answer this near the bound: it takes more time, not another horizon."""


@dataclass(frozen=True)
class SolverAnswer:
    """Whether a schedule within the horizon is there: its order, or None with what was proved, if anything.

    Attributes:
        row: the order.
        bound: ms that no schedule ends before.
    """

    row: Array | None
    bound: float = 0.0


def lessen(search: Search, until: float) -> None:
    """Asks for the least makespan, from the best order on, until `until` (seconds since the search began).

    First in few steps of time, which closes in on it, then in more, which proves it. Where several stages of a rank
    share its memory this finds and proves more than questions of one horizon after another.
    """
    until -= STOPPING
    for number, num_steps in enumerate(ROUGH_STEPS):
        if search.closed or search.seconds >= until:
            return
        answer = least(search.problem, search.row, num_steps, until - search.seconds, search.seed + number)
        if answer.row is not None:
            search.take(time_of(search.problem, answer.row), answer.row, "exact")
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
        answer = within(search.bounded, horizon, most, seed, search.span)
        seed += 1
        if answer.row is not None:
            before = search.value
            search.take(time_of(search.problem, answer.row), answer.row, "exact")
            unanswered = float("inf") if search.value < before else horizon
        elif answer.bound > 0:
            search.improve_bound(answer.bound)
            if unanswered > search.value:
                share = max(search.stop_at_gap, share / 4) * (1 - 1e-6)
        else:
            unanswered = horizon
        if unanswered < search.lower_bound * (1 + _NEAR):
            unanswered = float("inf")
            seconds *= 2
        search.report("exact")


def within(problem: Problem, horizon: float, seconds: float, seed: int = 0, span: Span | None = None) -> SolverAnswer:
    """Looks for a schedule that ends by `horizon` (ms), for at most `seconds`.

    With `span`, whose bounded problem is given: for one whose span is at most `horizon` less its shift.
    """
    began = time.perf_counter()
    model, made = _modelled(problem, TimeGrid.of(_times(problem), horizon))
    if span is not None and not span.fixed:
        _first_starts(model, problem, span, made)
    answer = model.solve(seconds - (time.perf_counter() - began), seed)
    return SolverAnswer(_order_found(problem, model, made) if answer.found else None, answer.bound)


def least(problem: Problem, row: Array, num_steps: int, seconds: float, seed: int) -> SolverAnswer:
    """The least makespan, from the order `row` on: a better order, and what none is shorter than.

    Args:
        num_steps: of the makespan of `row`, in which times are counted where they have no common unit: few, and
            answers come soon and are rough.
    """
    began = time.perf_counter()
    start = np.empty(problem.queues.num_ops)
    model, made = _modelled(problem, TimeGrid.of(_times(problem), time_of(problem, row, start), num_steps))
    for op, ms in zip(made, start.tolist(), strict=True):
        model.hint(op, ms)
    model.minimize(made)
    answer = model.solve(seconds - (time.perf_counter() - began), seed, probes=True)
    if not answer.found:
        return SolverAnswer(None, answer.bound if answer.refuted else 0.0)
    return SolverAnswer(_order_found(problem, model, made), answer.bound)


def _times(problem: Problem) -> Iterator[float]:
    queues = problem.queues
    return (float(ms) for times in (queues.duration, queues.delay) for ms in times)


def _modelled(problem: Problem, grid: TimeGrid) -> tuple[OrderModel, list[ModelOp]]:
    """The model of all schedules that end by the grid's last step, and its ops."""
    model = OrderModel(grid)
    return model, model.add_ops(_op_arrays(problem))


def _op_arrays(problem: Problem) -> OpArrays:
    """A problem's ops one by one: needs within queues and between them, and forwards that wait for memory."""
    queues = problem.queues
    given = waits(problem)
    head, tail = heads_and_tails(problem, given, work=work_is_cheap(problem))
    cap, release = queues.cap.copy(), given.release.copy()
    for r in range(queues.num_ranks):
        mine = slice(queues.rank_first[r], queues.rank_first[r + 1])
        # Where memory is freed at one op alone, waits say all. Elsewhere they cost the solver more than they tell it.
        if np.count_nonzero(queues.memory[mine] > 0) == np.count_nonzero(queues.memory[mine] < 0) == 1:
            cap[r] = np.inf
        else:
            release[:, mine] = NONE
    queue_of = np.repeat(np.arange(len(queues.rank)), queues.size)
    number = np.arange(queues.num_ops) - queues.op_first[queue_of]
    before = [queue_of, queues.message_from[queue_of], queues.local_from[queue_of], *release[:, queue_of]]
    lag = [np.ones_like(number), np.zeros_like(number), np.zeros_like(number), *given.lag[:, queue_of]]
    late = [np.zeros(len(number)), queues.delay[queue_of], *np.zeros((3, len(number)))]
    there = [np.flatnonzero((q >= 0) & (number >= steps)) for q, steps in zip(before, lag, strict=True)]
    source = [
        queues.op_first[q[to]] + number[to] - steps[to] for q, steps, to in zip(before, lag, there, strict=True)
    ]
    memory = queues.memory[queue_of]
    keys = zip(problem.stage, queues.pipeline.tolist(), strict=True)
    forward = np.array([problem.number["F", stage, pipeline] for stage, pipeline in keys])
    return OpArrays(
        duration=queues.duration[queue_of],
        head=head,
        tail=own_tails(queues, tail),
        rows=np.split(np.arange(queues.num_ops), queues.row_first[1:-1]),
        source=np.concatenate(source),
        to=np.concatenate(there),
        delay=np.concatenate([ms[to] for ms, to in zip(late, there, strict=True)]),
        takes=np.maximum(memory, 0.0),
        gives=np.maximum(-memory, 0.0),
        cap=cap,
        taker=queues.op_first[forward[queue_of]] + number,
    )


def _order_found(problem: Problem, model: OrderModel, made: list[ModelOp]) -> Array | None:
    """The order that the solver found, rank after rank; ops that start together (of no length) in queue order."""
    queues = problem.queues
    queue_of = np.repeat(np.arange(len(queues.rank)), queues.size)
    number = np.arange(queues.num_ops) - queues.op_first[queue_of]
    start = np.array([model.value(op.start) for op in made])
    row = queue_of[np.lexsort((queue_of, number, start, queues.rank[queue_of]))]
    runs = time_of(problem, row) >= 0 and fits(problem, row)  # not always, where ops of no length start together
    return row if runs else None


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
