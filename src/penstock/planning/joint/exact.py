"""Exact solving by CP-SAT where forms are free (`order_model`): ops that a form lacks are absent.

Each queue runs in the order of microbatches, as `check` demands.

Besides, activations are sent to host memory without a change of when forwards and backwards run, rank by rank:

    given    an order that keeps to both memories of each rank together, and when its ops start
    kept     each F, and each I (or B): so nothing changes for other ranks
    asked    for each rank alone: which activations go, when O and L run on its stream, and where W stands

What `away` does op by op, without a look at the clock, is often enough. Where an order has no room to spare it is
not: W has to give way, and what comes back must be there in time. A rank is a small problem of its own, so this comes
to an answer where CP-SAT over all ranks finds none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from penstock.engine.network import NONE, Array
from penstock.planning.bounds import heads_and_tails, own_tails
from penstock.planning.joint.bounds import relaxed, relaxed_waits
from penstock.planning.joint.problem import JointProblem
from penstock.planning.joint.rows import WHOLE, F, I, L, O, Orders, R, W
from penstock.planning.order_model import ModelOp, OrderModel, TimeGrid

if TYPE_CHECKING:
    from penstock.planning.joint.search import JointSearch

MOST_OPS = 500
"""Above this CP-SAT finds and proves nothing in the time that local search needs."""

MOST_ON_RANK = 400
"""Ops of one rank, above which CP-SAT takes longer than other steps need."""

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
    given: Orders | None = None,
) -> None:
    """Adds the ops of a chain, whose order is that of their microbatches, and what they hold.

    Args:
        made, forms: of each op and of each cell; out.
        given: their halves stay as they are there, none runs again, and what comes back from host memory takes its
            room when the rank begins it, between its own ops. Otherwise it does so when it begins to come back.
    """
    ops, r = problem.ops, int(problem.ops.chain_rank[c])
    times, size, first = ops.times[c].tolist(), int(ops.size[c]), int(ops.first[c])
    mine = [first + kind * size for kind in range(ops.num_kinds)]
    for j in range(size):
        cell = int(ops.cell_first[c]) + j
        is_whole = not ops.may_split[c] if given is None else bool(given.whole[cell])
        is_open = bool(ops.may_whole[c] and ops.may_split[c]) and given is None
        again = model.choice(bool(ops.may_again[c]) and given is None)
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
        _hold(model, problem, c, [made.get(op + j) for op in mine], forms[cell], given is not None)
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


def _hold(
    model: OrderModel, problem: JointProblem, c: int, made: list[ModelOp | None], form: Forms, issued: bool
) -> None:
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
    begun = home.start
    if issued:
        begun = model.op(0.0, [r], present=form.away)
        model.need(out, begun, only_if=form.away)
        begun = begun.start
        model.model.add(home.start >= begun).only_enforce_if(form.away)
    model.change(r, model.either(form.away, out.end, f.start), -held)
    model.change(r, model.either(form.away, begun, f.start), held)
    model.change(("host", r), model.either(form.away, out.start, 0), held)
    model.change(("host", r), model.either(form.away, home.end, 0), -held)


def limit_rank(model: OrderModel, problem: JointProblem, r: int) -> None:
    """Caps what a rank holds, and what it has in host memory."""
    model.limit(r, float(problem.ops.cap[r]))
    model.limit(("host", r), float(problem.ops.host[r]))


def _orders_found(
    problem: JointProblem, model: OrderModel, made: dict[int, ModelOp], forms: dict[int, Forms]
) -> Orders:
    ops, orders = problem.ops, problem.orders()
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


def sent_away_in_time(
    problem: JointProblem, given: Orders, seconds: float, ranks: Sequence[int], seed: int = 0
) -> tuple[Orders | None, int | None]:
    """Asks for a row of each rank, till one has none.

    Args:
        given: none of it is away or runs again. It need not keep to the cap of each rank alone.
        seconds: that all ranks together may take.
        ranks: all of them, in the order in which they are asked for.

    Returns:
        Orders no longer than before, or None where not all ranks have a row; and the rank for which it was proved
        that there is no row, or None.
    """
    began = time.perf_counter()
    orders = Orders(*(array.copy() for array in given))
    problem.fits(orders)  # for its forms: it need not be true
    start = np.empty(problem.num_ops)
    horizon = problem.timed(orders, start)
    if horizon < 0:
        return None, None
    for r in ranks:
        row = _row(problem, orders, r, start, horizon, seconds - (time.perf_counter() - began), seed)
        if not isinstance(row, list):
            return None, None if row is None else r
        orders.row[r, : len(row)] = row
        orders.length[r] = len(row)
        for op in row:
            if problem.ops.kind[op] == O:
                orders.away[problem.ops.cell[op]] = True
    return orders, None


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
