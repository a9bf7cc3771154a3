"""Exact solving by CP-SAT where forms are free (`order_model`): ops that a form lacks are absent.

Each queue runs in the order of microbatches, as `check` demands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.network import NONE, Array
from penstock.planning.bounds import heads_and_tails, own_tails
from penstock.planning.joint.bounds import relaxed, relaxed_waits
from penstock.planning.joint.problem import JointProblem
from penstock.planning.order_model import ModelOp, OrderModel, TimeGrid
from penstock.planning.row_walk import WHOLE, F, I, L, O, Orders, R, W

if TYPE_CHECKING:
    from penstock.planning.joint.search import JointSearch

MOST_OPS = 500
"""Above this CP-SAT finds and proves nothing in the time that local search needs."""

_STEPS = 1_000_000
"""Parts of a horizon that times are counted in where no unit is found."""


class Forms(NamedTuple):
    """The literals of a cell's form, as `Orders` has them."""

    again: Any
    whole: Any
    away: Any


Window = Callable[[int], tuple[float, float]]
"""Of an F, or an I or B: ms before it can start, and ms that follow its end in its shortest form."""


def solve(search: JointSearch) -> None:
    """Asks for shorter orders and forms, from the best so far on, and a better bound, for the time that is left."""
    began, problem, seconds = time.perf_counter(), search.problem, search.left
    assert search.orders is not None
    ops = problem.ops
    model = OrderModel(TimeGrid.of(map(float, (*ops.times.ravel(), *ops.delay)), search.value, _STEPS))
    window = _windows(problem)
    start: dict[int, ModelOp] = {}
    forms: dict[int, Forms] = {}
    for c in range(len(problem.chains)):
        add_chain(model, problem, c, window, start, forms)
    for op in np.flatnonzero(ops.message_from != NONE).tolist():
        model.need(start[int(ops.message_from[op])], start[op], float(ops.delay[op]))
    for r in range(problem.num_ranks):
        limit_rank(model, problem, r)
    model.minimize(start.values(), search.lower_bound)
    _hint(model, problem, search.orders, start, forms)
    answer = model.solve(seconds - (time.perf_counter() - began), search.seed)
    if answer.found:
        search.take(_orders_found(problem, model, start, forms), "exact")
    if not answer.refuted:  # that is only where rounding leaves no room
        search.improve_bound(answer.bound)
    search.report("exact")


def _windows(problem: JointProblem) -> Window:
    """What is known of every form, from the bounds."""
    ops, least = problem.ops, relaxed(problem)
    head, tail = heads_and_tails(least, relaxed_waits(problem, least))
    tail = own_tails(least.queues, tail)
    back = "I" if problem.forms.split else "B"

    def window(op: int) -> tuple[float, float]:
        pipeline, stage = problem.chains[ops.chain[op]]
        queue = least.number["F" if ops.kind[op] == F else back, stage, pipeline]
        at = least.queues.op_first[queue] + ops.number[op]
        return float(head[at]), float(tail[at])

    return window


def add_chain(
    model: OrderModel,
    problem: JointProblem,
    c: int,
    window: Window,
    made: dict[int, ModelOp],
    forms: dict[int, Forms],
) -> None:
    """Adds the ops of a chain, whose order is that of their microbatches, and what they hold.

    Args:
        made, forms: of each op and of each cell; out.
    """
    ops, r = problem.ops, int(problem.ops.chain_rank[c])
    times, size, first = ops.times[c].tolist(), int(ops.size[c]), int(ops.first[c])
    mine = [first + kind * size for kind in range(ops.num_kinds)]
    for j in range(size):
        cell = int(ops.cell_first[c]) + j
        is_whole = not ops.may_split[c]
        is_open = bool(ops.may_whole[c] and ops.may_split[c])
        again = model.choice(bool(ops.may_again[c]))
        whole = model.choice(is_open, is_whole)
        away = model.choice(bool(ops.may_away[c]))
        forms[cell] = Forms(again, whole, away)
        made[mine[F] + j] = f = model.op(times[F], [r], *window(mine[F] + j))
        ms, form = times[WHOLE if is_whole else I], (whole, times[WHOLE]) if is_open else None
        made[mine[I] + j] = b = model.op(ms, [r], *window(mine[I] + j), form=form)
        model.need(f, b)
        if ops.may_again[c]:
            made[mine[R] + j] = redone = model.op(times[R], [r], present=again)
            model.need(f, redone, only_if=again)
            model.need(redone, b, only_if=again)
        if ops.may_split[c]:
            made[mine[W] + j] = w = model.op(times[W], [r], present=whole.negated())
            model.need(b, w, only_if=w.present)
        if ops.may_away[c]:
            out, home = (model.op(times[kind], [("stream", r)], present=away) for kind in (O, L))
            made[mine[O] + j], made[mine[L] + j] = out, home
            for before, after in ((f, out), (out, home), (home, b)):
                model.need(before, after, only_if=away)
            if ops.may_again[c]:
                model.model.add_implication(away, again.negated())
        _hold(model, problem, c, [made.get(op + j) for op in mine], forms[cell])
        if j:
            _follow(model, [made.get(op + j - 1) for op in mine], [made.get(op + j) for op in mine], whole)


def _follow(model: OrderModel, before: list[ModelOp | None], after: list[ModelOp | None], whole: Any) -> None:
    """The ops of a microbatch come after those of the one before it, kind by kind.

    Of an op that is not there the start is free: it may stand between the others. A B adds to the gradients of the
    weights too, in its turn.
    """
    for kind, (one, other) in enumerate(zip(before, after, strict=True)):
        if one is None or other is None:
            continue
        if kind in (F, I):
            model.need(one, other)
        elif kind == W:
            back = after[I]
            assert back is not None
            model.need(one, other, only_if=[one.present, other.present])
            model.need(one, back, only_if=[one.present, whole])
        else:
            model.model.add(other.start >= one.start)


def _hold(model: OrderModel, problem: JointProblem, c: int, made: list[ModelOp | None], form: Forms) -> None:
    """What a microbatch holds: some from its F on, the rest from its R on where it has one; I frees a part. In host
    memory it counts from the start of O to the end of L."""
    ops, r = problem.ops, int(problem.ops.chain_rank[c])
    held, kept, freed = float(ops.held[c]), float(ops.kept[c]), float(ops.freed[c] * ops.held[c])
    f, redone, b, w, out, home = (*made, None, None)[:6]
    assert f is not None
    assert b is not None
    model.change(r, f.start, kept)
    model.change(r, f.start if redone is None else model.either(form.again, redone.start, f.start), held - kept)
    model.change(r, b.end, -freed)
    model.change(r, b.end if w is None else model.either(form.whole, b.end, w.end), freed - held)
    if out is None or home is None:
        return
    model.change(r, model.either(form.away, out.end, f.start), -held)
    model.change(r, model.either(form.away, home.start, f.start), held)
    model.change(("host", r), model.either(form.away, out.start, 0), held)
    model.change(("host", r), model.either(form.away, home.end, 0), -held)


def limit_rank(model: OrderModel, problem: JointProblem, r: int) -> None:
    """Caps what a rank holds, and what it has in host memory."""
    model.limit(r, float(problem.ops.cap[r]))
    model.limit(("host", r), float(problem.ops.host[r]))


def _orders_found(
    problem: JointProblem, model: OrderModel, made: dict[int, ModelOp], forms: dict[int, Forms]
) -> Orders:
    ops, orders = problem.ops, Orders.of(problem.ops)
    for cell, form in forms.items():
        orders.again[cell], orders.whole[cell], orders.away[cell] = map(model.value, form)
    for r in range(problem.num_ranks):
        present = [
            op for op in np.flatnonzero(ops.rank == r).tolist() if op in made and model.value(made[op].present)
        ]
        # What goes to host memory or comes back then is started before what the rank itself runs.
        present.sort(key=lambda op: (model.value(made[op].start), ops.kind[op] < O, ops.number[op], ops.kind[op]))
        orders.row[r, : len(present)] = present
        orders.length[r] = len(present)
    return orders


def _hint(
    model: OrderModel, problem: JointProblem, best: Orders, made: dict[int, ModelOp], forms: dict[int, Forms]
) -> None:
    """Gives the solver the best orders so far to begin with."""
    times: Array = np.empty(problem.num_ops)
    problem.timed(best, times)
    for op, each in made.items():
        if best.place[op] >= 0:
            model.hint(each, float(times[op]))
    for cell, form in forms.items():
        for literal, chosen in zip(form, (best.again, best.whole, best.away), strict=True):
            model.model.add_hint(literal, bool(chosen[cell]))
