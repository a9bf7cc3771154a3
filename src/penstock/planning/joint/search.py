"""The search for orders and forms: starts of many kinds, then annealing on threads, then CP-SAT.

bound     `bounds.lower_bound`: true for every form
starts    plans in which all ops have one form (`planning.search`); library schedules, with forwards run again
          where they hold too much (`passes.recompute`); where activations may go to host memory, plans for that
          memory too, of which those that are needed last go there (`away`)
anneal    moves of order and form (`row_walk`), from the best so far
exact     CP-SAT with optional intervals, where the problem is small
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.passes import recompute
from penstock.planning import order_model, strategy
from penstock.planning.annealing import annealed
from penstock.planning.joint import exact
from penstock.planning.joint.away import sent_away
from penstock.planning.joint.bounds import lower_bound, relaxed
from penstock.planning.joint.problem import JointProblem
from penstock.planning.library_starts import MOST_OPS, built
from penstock.planning.options import OpForms
from penstock.planning.problem import Problem, pose
from penstock.planning.progress import Incumbent, Progress
from penstock.planning.row_walk import F, I, L, O, Orders, R, W
from penstock.planning.search import RowWalk, Search, greedy
from penstock.planning.threads import is_quick
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


def run(search: JointSearch) -> None:
    """Searches until the gap is closed or the time of the search is over; what was found stands."""
    with suppress(KeyboardInterrupt):
        if search.how == "one microbatch at a time":
            library(search)
            search.report("library")
            of_one_form(search, search.seconds + _plain_share(search.problem) * search.left)
        small = search.problem.num_ops <= exact.MOST_OPS and order_model.available()
        annealed(search, JointWalk, search.seconds + (_WALKED_SHARE if small else 1.0) * search.left)
        if small and not search.closed and search.left > 0:
            exact.solve(search)


def _plain_share(problem: JointProblem) -> float:
    forms, ranks = problem.forms, problem.ops.chain_rank
    hosts_several = len(ranks) > len(np.unique(ranks))
    return _PLAIN_SHARE_OF_BACKWARDS if hosts_several and not (forms.again or forms.away) else _PLAIN_SHARE


def one_by_one(problem: JointProblem) -> Orders:
    """Every microbatch alone, each forward run again that may be, or all but those of a rank's last stage gone to
    host memory where they do not fit together: it fits wherever the limits leave room."""
    ops, orders = problem.ops, Orders.of(problem.ops)
    room = [_has_room(problem, r, ops.kept) for r in range(problem.num_ranks)]
    again = ops.may_again & np.array(room)[ops.chain_rank]
    for c in range(len(ops.size)):
        cells = slice(int(ops.cell_first[c]), int(ops.cell_first[c] + ops.size[c]))
        orders.again[cells] = again[c]
        orders.whole[cells] = not ops.may_split[c]
    for r in range(problem.num_ranks):
        mine = range(ops.chain_first[r], ops.chain_first[r + 1])
        for j in range(max((int(ops.size[c]) for c in mine), default=0)):
            for p in range(problem.placement.num_pipelines):
                chains = [c for c in mine if problem.chains[c][0] == p and j < ops.size[c]]  # by stage
                away = [c for c in chains[:-1] if not room[r] and ops.may_away[c]]
                for c in away:
                    orders.away[ops.cell_first[c] + j] = True
                steps = [(c, kind) for c in chains for kind in ((F, O) if c in away else (F,))]
                for c in reversed(chains):
                    steps += [(c, L)] * (c in away)
                    steps += [(c, R)] * bool(again[c]) + [(c, I)] + [(c, W)] * bool(ops.may_split[c])
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
        plain += [_posed(problem, cap, split) for cap in _less_what_moves(problem) for split in splits]
        for split in splits[forms.whole != forms.split and bounding :]:
            plain.append(_posed(problem, problem.total_cap, split))
    if all(_has_room(problem, r, problem.ops.held) for r in range(problem.num_ranks)):
        plain += [_posed(problem, problem.limits.cap, split) for split in splits]
    for number, each in enumerate(plain):
        # However short the time, a small problem has the first orders of its plain forms: one microbatch at a time,
        # which the search begins with, takes several times as long.
        over = search.seconds >= until
        if search.closed or (over and not is_quick(problem.num_ops)):
            break
        seconds = (until - search.seconds) / (len(plain) - number)
        inner = _planned(search, each, None if over else seconds)
        made = problem.read(each.schedule(inner.row, "plan"))
        search.take(made, inner.how)
        if forms.away:
            for orders in sent_away(problem, made):
                search.take(orders, f"{inner.how}, offloaded")
        if number == 0 and bounding:
            search.improve_bound(inner.lower_bound)
        if forms.split and forms.whole and each.kind.count("W"):
            search.take(joined(problem, made), inner.how)
        search.report(inner.how)


def _posed(problem: JointProblem, cap: Sequence[float], split: bool) -> Problem:
    """The problem in which all ops have one form, under other caps."""
    counts = [problem.microbatch_pipeline.count(p) for p in range(problem.placement.num_pipelines)]
    return pose(
        problem.costs, problem.placement, problem.num_ranks, len(problem.microbatch_pipeline), problem.links,
        problem.limits.held, cap, split, counts,
    )  # fmt: skip


def _planned(search: JointSearch, problem: Problem, seconds: float | None) -> Search:
    """A plan for another problem, in `seconds`; its first order where these are None."""
    inner = strategy.begin(problem, "makespan", search.seed, search.stop_at_gap, None, time.perf_counter())
    greedy(inner)
    if seconds is not None:
        inner.until = seconds
        strategy.run(inner)
    return inner


def _less_what_moves(problem: JointProblem) -> list[list[float]]:
    """Both memories together, less one activation of each rank or two, where that leaves more than the rank's own."""
    ops, found = problem.ops, list[list[float]]()
    for several in (2, 1):
        caps = []
        for r, (total, own) in enumerate(zip(problem.total_cap, problem.limits.cap, strict=True)):
            held = max((float(ops.held[c]) for c in np.flatnonzero(ops.chain_rank == r)), default=0.0)
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
                if before + ops.held[c] > cap * (1 + EPSILON):
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
                and ops.may_whole[ops.chain[op]]
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
        return float(self._ops.times[:, : W + 1].mean()) or 1.0

    def begin(self, search: JointSearch, until: float) -> None:
        assert search.orders is not None
        for array, given in zip(self.orders, search.orders, strict=True):
            array[:] = given
        self._begin()

    def bring(self, search: JointSearch) -> None:
        search.take(self.best_orders, "local search")
