"""The search for orders and forms: starts of many kinds, then annealing on threads, then CP-SAT.

bound     `bounds.lower_bound`: true for every form
starts    plans in which all ops have one form (`planning.search`); library schedules, with forwards run again
          where they hold too much (`passes.recompute`); where activations may go to host memory, plans for that
          memory too, of which those that are needed last go there (`away`)
anneal    moves of order and form (`row_walk`), from the best so far
exact     CP-SAT (`planning.exact`), where the problem is small: ops that a form lacks are absent, and each queue
          runs in the order of microbatches, as `check` demands
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.engine.network import NONE, Array
from penstock.engine.tolerance import EPSILON
from penstock.passes import recompute
from penstock.planning import exact, strategy
from penstock.planning.annealing import Incumbent, annealed, is_quick
from penstock.planning.bounds import heads_and_tails, own_tails
from penstock.planning.exact import ModelOp, OrderModel, TimeGrid
from penstock.planning.joint.away import sent_away
from penstock.planning.joint.bounds import lower_bound, relaxed, relaxed_waits
from penstock.planning.joint.problem import JointProblem
from penstock.planning.options import OpForms
from penstock.planning.problem import WHOLE, F, I, L, O, Orders, R, W
from penstock.planning.result import Progress
from penstock.planning.search import RowWalk
from penstock.planning.starts import MOST_OPS, built
from penstock.schedule import Schedule, ScheduleError

_PLAIN_SHARE, _WALKED_SHARE = 0.25, 0.5
"""Shares of the time left that plans of one form take, and annealing where CP-SAT comes after it."""

_PLAIN_SHARE_OF_BACKWARDS = 0.5
"""The first of them where only backwards have forms, and ranks host several stages: there plain plans find most."""


@dataclass
class JointSearch(Incumbent[JointProblem]):
    """The state of a search: the best so far, and what is proved."""

    orders: Orders | None = None

    def take(self, orders: Orders, how: str) -> None:
        """Keeps a copy of orders if they run, keep to the caps and are the best so far."""
        if not self.problem.fits(orders):
            return
        if self.improves(self.problem.timed(orders), how):
            self.orders = Orders(*(array.copy() for array in orders))

    def schedule(self, name: str, max_in_flight: float | None) -> Schedule:
        """The best so far."""
        assert self.orders is not None
        return replace(self.problem.schedule(self.orders, name), max_in_flight=max_in_flight)

    def take_schedule(self, schedule: Schedule, how: str) -> None:
        """The same for a schedule of this placement."""
        if allows(self.problem.forms, schedule):
            self.take(self.problem.read(schedule), how)


def allows(forms: OpForms, schedule: Schedule) -> bool:
    """Whether a schedule has no other forms."""
    kinds = {op.kind for row in schedule.order for op in row}
    return (
        kinds <= {"F", "R", "B", "I", "W"}
        and (forms.again or "R" not in kinds)
        and (forms.whole or "B" not in kinds)
        and (forms.split or not kinds & {"I", "W"})
    )


def begin(
    problem: JointProblem, seed: int, stop_at_gap: float, on_progress: Callable[[Progress], None] | None, began: float
) -> JointSearch:
    """A search with its bound, and with orders to begin with."""
    search = JointSearch(problem, lower_bound(problem), seed, stop_at_gap, on_progress, began)
    search.take(one_by_one(problem), "one microbatch at a time")
    if search.orders is None:
        raise ScheduleError(
            f"one microbatch at a time exceeds the caps {list(problem.limits.cap)}: a bug in penstock", rule="memory"
        )
    return search


def run(search: JointSearch) -> bool:
    """Searches until the gap is closed or the time of the search is over.

    Returns whether the search came to that end: an interrupt from the keyboard ends it too, and the best orders found
    till then stand.
    """
    with suppress(KeyboardInterrupt):
        if search.how == "one microbatch at a time":
            library(search)
            search.report("library")
            of_one_form(search, search.seconds + _plain_share(search.problem) * search.left)
        small = search.problem.num_ops <= exact.MOST_OPS_IF_SEVERAL and exact.available()
        annealed(search, JointWalk, search.seconds + (_WALKED_SHARE if small else 1.0) * search.left)
        if small and not search.closed and search.left > 0:
            solve(search)
        return True
    return False


def _plain_share(problem: JointProblem) -> float:
    forms, ranks = problem.forms, problem.ops.chain_rank
    hosts_several = len(ranks) > len(np.unique(ranks))
    return _PLAIN_SHARE_OF_BACKWARDS if hosts_several and not (forms.again or forms.away) else _PLAIN_SHARE


def one_by_one(problem: JointProblem) -> Orders:
    """Every microbatch alone, each forward run again that may be, or all but those of a rank's last stage gone to
    host memory where they do not fit together: it fits wherever the limits leave room."""
    ops, orders = problem.ops, Orders.of(problem.ops)
    room = [_has_room(problem, r, ops.forms.kept) for r in range(problem.num_ranks)]
    again = ops.forms.may_again & np.array(room)[ops.chain_rank]
    for c in range(len(ops.size)):
        cells = slice(int(ops.cell_first[c]), int(ops.cell_first[c] + ops.size[c]))
        orders.again[cells] = again[c]
        orders.whole[cells] = not ops.forms.may_split[c]
    for r in range(problem.num_ranks):
        mine = range(ops.chain_first[r], ops.chain_first[r + 1])
        for j in range(max((int(ops.size[c]) for c in mine), default=0)):
            for p in range(problem.placement.num_pipelines):
                chains = [c for c in mine if problem.chains[c][0] == p and j < ops.size[c]]  # by stage
                away = [c for c in chains[:-1] if not room[r] and ops.forms.may_away[c]]
                for c in away:
                    orders.away[ops.cell_first[c] + j] = True
                steps = [(c, kind) for c in chains for kind in ((F, O) if c in away else (F,))]
                for c in reversed(chains):
                    steps += [(c, L)] * (c in away)
                    steps += [(c, R)] * bool(again[c]) + [(c, I)] + [(c, W)] * bool(ops.forms.may_split[c])
                for c, kind in steps:
                    orders.row[r, orders.length[r]] = ops.first[c] + kind * ops.size[c] + j
                    orders.length[r] += 1
    return orders


def of_one_form(search: JointSearch, until: float) -> None:
    """Plans in which all ops have one form: every backward halves, or every one whole; none runs again.

    Where no forward may run again, `relaxed` is such a problem too: its bounds hold, and its halves that stand side
    by side are a B. Where activations may go to host memory, there are plans for both memories together, and of
    them and of the others those in which they go there.
    """
    problem, forms = search.problem, search.problem.forms
    bounding = not forms.again and (forms.away or (forms.whole and forms.split))
    plain = [relaxed(problem)] if bounding else []
    splits = ((True,) if forms.split else ()) + ((False,) if forms.whole else ())
    if forms.away:
        # Of what is on its way, room is taken at both ends.
        plain += [problem.of_one_form(cap, split) for cap in _less_what_moves(problem) for split in splits]
        for split in splits[forms.whole != forms.split and bounding :]:
            plain.append(problem.of_one_form(problem.total_cap, split))
    if all(_has_room(problem, r, problem.ops.forms.held) for r in range(problem.num_ranks)):
        plain += [problem.of_one_form(problem.limits.cap, split) for split in splits]
    for number, each in enumerate(plain):
        # However short the time, a small problem has the first orders of its plain forms: one microbatch at a time,
        # which the search begins with, takes several times as long.
        over = search.seconds >= until
        if search.closed or (over and not is_quick(problem.num_ops)):
            break
        inner = strategy.begin(each, "makespan", search.seed, search.stop_at_gap, None, time.perf_counter())
        inner.until = (until - search.seconds) / (len(plain) - number)
        goes_on = over or strategy.run(inner)
        made = problem.read(each.schedule(inner.row, "plan"))
        search.take(made, inner.how)
        if forms.away:
            for orders in sent_away(problem, made):
                search.take(orders, f"{inner.how}, offloaded")
        if number == 0 and bounding:
            search.improve_bound(inner.lower_bound)
        if forms.split and forms.whole and each.kind.count("W"):
            search.take(joined(problem, made), inner.how)
        if not goes_on:
            raise KeyboardInterrupt  # it ended the inner search, and ends this one
        search.report(inner.how)


def _less_what_moves(problem: JointProblem) -> list[list[float]]:
    """Both memories together, less one activation of each rank or two, where that leaves more than the rank's own."""
    ops, found = problem.ops, list[list[float]]()
    for several in (2, 1):
        caps = []
        for r, (total, own) in enumerate(zip(problem.total_cap, problem.limits.cap, strict=True)):
            held = max((float(ops.forms.held[c]) for c in np.flatnonzero(ops.chain_rank == r)), default=0.0)
            caps.append(max(own, total - several * held))
        if math.isfinite(max(caps)) and caps != list(problem.limits.cap):
            found.append(caps)
    return found


def _has_room(problem: JointProblem, r: int, kept: Array) -> bool:
    """Whether a rank can hold one microbatch, all of one stage and of those before it what `kept` says of each."""
    ops = problem.ops
    cap = float(ops.cap[r])
    for p in range(problem.placement.num_pipelines):
        before = 0.0
        for c in range(ops.chain_first[r], ops.chain_first[r + 1]):
            if problem.chains[c][0] == p:
                if before + ops.forms.held[c] > cap * (1 + EPSILON):
                    return False
                before += float(kept[c])
    return True


def joined(problem: JointProblem, orders: Orders) -> Orders:
    """The same orders with B for every I that its W follows at once, where a B gains."""
    ops, made = problem.ops, Orders.of(problem.ops)
    for r in range(problem.num_ranks):
        row = orders.row[r, : orders.length[r]].tolist()
        found: list[int] = []
        for op in row:
            last = found[-1] if found else -1
            if (
                last >= 0
                and ops.kind[op] == W
                and ops.kind[last] == I
                and ops.cell[op] == ops.cell[last]
                and ops.forms.may_whole[ops.chain[op]]
            ):
                made.whole[ops.cell[op]] = True
            else:
                found.append(op)
        made.row[r, : len(found)] = found
        made.length[r] = len(found)
    return made


def library(search: JointSearch) -> None:
    """Takes every library schedule of the placement, with forwards run again where it holds too much."""
    problem = search.problem
    if problem.num_ops > MOST_OPS:
        return
    num_microbatches = len(problem.microbatch_pipeline)
    # The first comes however short the time: its forwards run again, it bounds all plans.
    for number, (name, made) in enumerate(built(problem.placement, problem.num_ranks, num_microbatches)):
        if made.microbatch_pipeline == problem.microbatch_pipeline:
            _take_library(search, name, made, number > 0)
        if search.left <= 0:
            return


def _take_library(search: JointSearch, name: str, made: Schedule, timed: bool) -> None:
    """Takes a library schedule, and what comes of it by other forms.

    Args:
        timed: whether that ends with the time of the search.
    """
    problem = search.problem
    search.take_schedule(made, name)
    if problem.forms.away and allows(problem.forms, made):
        for orders in sent_away(problem, problem.read(made)):
            if timed and search.left <= 0:
                return
            search.take(orders, f"{name}, offloaded")
    if problem.forms.again and not (timed and search.left <= 0):
        # The pass counts what is held itself: not the limit a schedule was built for.
        with suppress(ScheduleError):  # it holds too much even then
            again = recompute(replace(made, max_in_flight=None), problem.costs, list(problem.limits.cap))
            search.take_schedule(again, f"{name}, recomputed")


class JointWalk(RowWalk[JointSearch]):
    """The walk where forms are open. Temperatures are shares of the mean duration of an op."""

    MOVES, HOT, COLD = (20_000.0, 2e7), 0.5, 0.1

    def __init__(self, problem: JointProblem, seed: int) -> None:
        super().__init__(problem, problem.ops, seed)

    @property
    def unit(self) -> float:
        return float(self._ops.forms.times[:, : W + 1].mean()) or 1.0

    def begin(self, search: JointSearch, until: float) -> None:
        assert search.orders is not None
        for array, given in zip(self.orders, search.orders, strict=True):
            array[:] = given
        self._begin()

    def bring(self, search: JointSearch) -> None:
        search.take(self.best_orders, "local search")


_STEPS = 1_000_000
"""Parts of a horizon that times are counted in where no unit is found."""


Forms = tuple[Any, Any, Any]
"""The literals of a cell's form, as `Orders` has them: again, whole, away."""
Window = Callable[[int], tuple[float, float]]
"""Of an F, or an I or B: ms before it can start, and ms that follow its end in its shortest form."""


def solve(search: JointSearch) -> None:
    """Asks for shorter orders and forms, from the best so far on, and a better bound, for the time that is left."""
    began, problem, seconds = time.perf_counter(), search.problem, search.left
    assert search.orders is not None
    ops = problem.ops
    model = OrderModel(TimeGrid.of(map(float, (*ops.forms.times.ravel(), *ops.delay)), search.value, _STEPS))
    window = _windows(problem)
    start: dict[int, ModelOp] = {}
    forms: dict[int, Forms] = {}
    for c in range(len(problem.chains)):
        _add_chain(model, problem, c, window, start, forms)
    for op in np.flatnonzero(ops.message_from != NONE).tolist():
        model.need(start[int(ops.message_from[op])], start[op], float(ops.delay[op]))
    for r in range(problem.num_ranks):
        model.limit(r, float(ops.cap[r]))
        model.limit(("host", r), float(ops.host[r]))
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


def _add_chain(
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
    times, size, first = ops.forms.times[c].tolist(), int(ops.size[c]), int(ops.first[c])
    mine = [first + kind * size for kind in range(ops.num_kinds)]
    for j in range(size):
        cell = int(ops.cell_first[c]) + j
        is_whole = not ops.forms.may_split[c]
        is_open = bool(ops.forms.may_whole[c] and ops.forms.may_split[c])
        again = model.choice(bool(ops.forms.may_again[c]))
        whole = model.choice(is_open, is_whole)
        away = model.choice(bool(ops.forms.may_away[c]))
        forms[cell] = again, whole, away
        made[mine[F] + j] = f = model.op(times[F], [r], *window(mine[F] + j))
        ms, form = times[WHOLE if is_whole else I], (whole, times[WHOLE]) if is_open else None
        made[mine[I] + j] = b = model.op(ms, [r], *window(mine[I] + j), form=form)
        model.need(f, b)
        if ops.forms.may_again[c]:
            made[mine[R] + j] = redone = model.op(times[R], [r], present=again)
            model.need(f, redone, only_if=again)
            model.need(redone, b, only_if=again)
        if ops.forms.may_split[c]:
            made[mine[W] + j] = w = model.op(times[W], [r], present=whole.negated())
            model.need(b, w, only_if=w.present)
        if ops.forms.may_away[c]:
            out, home = (model.op(times[kind], [("stream", r)], present=away) for kind in (O, L))
            made[mine[O] + j], made[mine[L] + j] = out, home
            for before, after in ((f, out), (out, home), (home, b)):
                model.need(before, after, only_if=away)
            if ops.forms.may_again[c]:
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
    given, r = problem.ops.forms, int(problem.ops.chain_rank[c])
    again, whole, away = form
    held, kept, freed = float(given.held[c]), float(given.kept[c]), float(given.freed[c] * given.held[c])
    f, redone, b, w, out, home = (*made, None, None)[:6]
    assert f is not None
    assert b is not None
    model.change(r, f.start, kept)
    model.change(r, f.start if redone is None else model.either(again, redone.start, f.start), held - kept)
    model.change(r, b.end, -freed)
    model.change(r, b.end if w is None else model.either(whole, b.end, w.end), freed - held)
    if out is None or home is None:
        return
    model.change(r, model.either(away, out.end, f.start), -held)
    model.change(r, model.either(away, home.start, f.start), held)
    model.change(("host", r), model.either(away, out.start, 0), held)
    model.change(("host", r), model.either(away, home.end, 0), -held)


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
