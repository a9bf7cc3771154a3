"""The state of a search for the shortest makespan or span, and the walks that look for it.

**The span as a makespan.** A rank that starts h ms late may end h ms late. The span of a rank is its last end less
its first start. A rank begins with the first forward of one of the pipelines it hosts, on the first of its stages
there. Everything that forward waits for runs before the rank has started:

    one pipeline, stages on different ranks      that start is the same in every schedule
    two pipelines, one in each direction         there are two such starts, and the order chooses
    a chain that visits a rank twice on its way  others may go first there, and only a latest start is known

So the largest span is at most the makespan in which max(h) - h counts after each rank's last op, h being its earliest
first start: that problem is searched. And it is at least the makespan with the latest first starts instead: that
problem is bounded. Where first starts are fixed the two are one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.engine import sweep
from penstock.engine.compiled import compiled
from penstock.engine.list_by_values import ListSpace
from penstock.engine.network import NONE, Array
from penstock.planning import forward_backward, row_walk
from penstock.planning.annealing import Annealer, Incumbent, S
from penstock.planning.bounds import OpArrays, jackson_bound, op_arrays, span_bound, ways
from penstock.planning.metropolis import Cooling
from penstock.planning.problem import BACKWARD_CLASS, Ops, Orders, Problem, fits, walk_first, walk_ops
from penstock.planning.row_walk import WalkSpace
from penstock.schedule import Schedule


class FirstOp(NamedTuple):
    """A queue whose first op a rank may begin with, and when (ms); `fixed` where it starts then in every such order,
    else it starts no later."""

    queue: int
    start: float
    fixed: bool


@dataclass(frozen=True)
class Span:
    """The span of a problem's orders, in makespans that are `shift` ms longer.

    Attributes:
        searched: the problem whose makespan, less `shift`, is at least the span.
        bounded: the problem whose makespan, less `shift`, is at most the span, in every order.
        firsts: of each rank, what it may begin with.
    """

    searched: Problem
    bounded: Problem
    shift: float
    firsts: tuple[tuple[FirstOp, ...], ...]

    @property
    def fixed(self) -> bool:
        """Whether each rank's first start is the same in every order."""
        return all(len(mine) <= 1 and all(first.fixed for first in mine) for mine in self.firsts)

    def lower_bound(self) -> float:
        """ms that no order's span is below."""
        return max(span_bound(self.bounded), jackson_bound(self.bounded) - self.shift)

    def of(self, start: Array) -> float:
        """The span (ms) of starts, one of each op."""
        queues, firsts, ends = self.searched.queues, *self._ends
        begun, over = np.full(queues.num_ranks, np.inf), np.zeros(queues.num_ranks)
        np.minimum.at(begun, queues.rank[firsts], start[queues.op_first[firsts]])
        np.maximum.at(over, queues.rank[firsts], start[ends] + queues.duration[firsts])
        return float(np.max(over - begun, initial=0.0))

    @cached_property
    def _ends(self) -> tuple[Array, Array]:
        """The queues that have ops, and the last op of each."""
        queues = self.searched.queues
        there = np.flatnonzero(queues.size > 0)
        return there, queues.op_first[there + 1] - 1


def span_of(problem: Problem) -> Span:
    """Works out how early and how late each rank may start."""
    queues = problem.queues
    firsts = _firsts(problem)
    earliest, latest = np.zeros(queues.num_ranks), np.zeros(queues.num_ranks)
    way = ways(queues)
    for r, mine in enumerate(firsts):
        earliest[r] = min((way[first.queue] for first in mine), default=0.0)
        latest[r] = max((first.start for first in mine), default=0.0)
    shift = float(latest.max(initial=0.0))
    searched = replace(problem, queues=queues._replace(tail=shift - earliest))
    bounded = replace(problem, queues=queues._replace(tail=shift - latest))
    return Span(searched, bounded, shift, firsts)


def _firsts(problem: Problem) -> tuple[tuple[FirstOp, ...], ...]:
    """What each rank may begin with: the first forward of each pipeline there."""
    queues = problem.queues
    way = ways(queues)
    forward = {
        (int(queues.pipeline[q]), problem.stage[q]): q
        for q in range(len(queues.rank))
        if problem.kind[q] == "F" and queues.size[q] > 0
    }
    found: list[tuple[FirstOp, ...]] = []
    for r in range(queues.num_ranks):
        mine = []
        after = _after(problem, r)
        for pipeline, hosts in enumerate(problem.placement.pipelines):
            if r not in hosts or (pipeline, 0) not in forward:
                continue
            stage = hosts.index(r)
            chain = [forward[pipeline, s] for s in range(stage)]
            if any(_may_go_first(problem, q, after) for q in chain):
                mine.append(FirstOp(forward[pipeline, stage], _all_of(problem, after), fixed=False))
            else:
                mine.append(FirstOp(forward[pipeline, stage], way[forward[pipeline, stage]], fixed=True))
        found.append(tuple(mine))
    return tuple(found)


def _after(problem: Problem, r: int) -> Array:
    """Of each queue, whether its ops need one of rank r."""
    queues = problem.queues
    after = queues.rank == r
    for _ in range(len(after)):
        further = after.copy()
        for before in (queues.message_from, queues.local_from):
            further |= (before != NONE) & after[before]
        if (further == after).all():
            break
        after = further
    return after


def _may_go_first(problem: Problem, chained: int, after: Array) -> bool:
    """Whether an op that needs none of the rank in question may run on the rank of queue `chained` before its first.

    That of the same pipeline is the forward of an earlier stage; any other either comes after, or goes that way too.
    """
    queues = problem.queues
    return any(
        not after[q]
        and queues.size[q] > 0
        and q != chained
        and (
            queues.pipeline[q] != queues.pipeline[chained]
            or (problem.kind[q] == "F" and problem.stage[q] < problem.stage[chained])
        )
        for q in range(queues.rank_first[queues.rank[chained]], queues.rank_first[queues.rank[chained] + 1])
    )


def _all_of(problem: Problem, after: Array) -> float:
    """All ops that need none of the rank in question one after the other, each with the delay of its message onwards:
    no path through them is longer."""
    queues = problem.queues
    return float(((queues.duration + queues.delay_to) * queues.size)[~after].sum())


_MOST_SEEN = 8


@dataclass
class Search(Incumbent[Problem]):
    """The state of a search for the shortest makespan.

    Attributes:
        span: where the span is to be short; then value and bound here are its shift above those of the span.
        row: the best so far.
        seen: orders that were the best for a while, the newest last.
    """

    span: Span | None = None
    row: Array = None
    seen: list[Array] = field(default_factory=list)

    @property
    def shift(self) -> float:
        """By how many ms value and bound are above those of the objective."""
        return 0.0 if self.span is None else self.span.shift

    @property
    def bounded(self) -> Problem:
        """The problem whose makespan is a lower bound for the value of every order."""
        return self.problem if self.span is None else self.span.bounded

    def schedule(self, name: str, max_in_flight: float | None) -> Schedule:
        """The best so far."""
        return self.problem.schedule(self.row, name, max_in_flight)

    def take(self, value: float, row: Array, how: str) -> None:
        """Keeps an order if it is the best so far; `value` is its makespan.

        Raises:
            ScheduleError: its value is below the bound, so one of the two is wrong.
        """
        if self.span is not None and not self.span.fixed:
            start = np.empty(self.problem.queues.num_ops)
            time_of(self.problem, row, start)
            value = self.span.of(start) + self.shift
        if self.improves(value, how):
            self.row = row.copy()
            self.seen = [*self.seen[-_MOST_SEEN + 1 :], self.row]

    def op_arrays(self) -> OpArrays:
        """The ops of the problem that bounds the value of every order."""
        return op_arrays(self.bounded)

    def start(self) -> Array:
        """When each op of the best so far starts (ms)."""
        start = np.empty(self.problem.queues.num_ops)
        time_of(self.problem, self.row, start)
        return start

    def take_start(self, start: Array, how: str) -> None:
        """Keeps the order in which ops start at some moments, if it runs within the caps and is the best so far."""
        row = self.problem.row_of_starts(start)
        if fits(self.problem, row):  # not always, where ops of no length start together
            self.take(time_of(self.problem, row), row, how)

    def good_rows(self) -> list[Array]:
        """Orders worth a second look, the best first."""
        return self.seen[::-1]


def class_rows(problem: Problem) -> Array:
    """Orders of kinds to start from: backward, forward, weight gradients; and the same with the last two
    exchanged.
    """
    classes = problem.priority_class
    return np.stack([classes, np.where(classes == BACKWARD_CLASS, classes, 3 - classes)])


def time_of(problem: Problem, row: Array, start: Array | None = None) -> float:
    """The makespan of fixed orders in which ops start as soon as possible; -1 if they deadlock."""
    queues = problem.queues
    num_ranks = queues.num_ranks
    start = np.empty(queues.num_ops) if start is None else start
    head, place = np.empty(len(queues.rank), np.int64), np.empty(num_ranks, np.int64)
    stack, waits = np.empty(2 * num_ranks, np.int64), np.empty(num_ranks, np.int64)
    module: Any = compiled(sweep)
    return float(module.earliest(queues, None, row, start, head, place, np.empty(num_ranks), stack, waits))


def mean_duration(problem: Problem) -> float:
    """ms of an op, each queue counted once."""
    durations = problem.queues.duration
    return float(np.mean(durations)) if len(durations) else 0.0


class Trials(Annealer[Search]):
    """Step 2: one thread's justification of orders from random starts, at no temperature."""

    MODULE, MOVES, HOT, COLD = forward_backward, (1000.0, 5e5), 1.0, 1.0

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed)
        queues = problem.queues
        self._problem, self._back, self._space = problem, queues.turned(), ListSpace.of(queues)
        self._classes, self._scale = class_rows(problem), mean_duration(problem)
        self._best, self._best_row = float("inf"), np.empty(queues.num_ops, np.int64)

    @property
    def unit(self) -> float:
        return self._best

    def begin(self, search: Search, until: float) -> None:
        self._best, self._best_row[:] = time_of(self._problem, search.row), search.row

    def move(self, cooling: Cooling, done: float) -> int | None:
        self._best = self._module.trials(
            self._problem.queues, self._back, self._classes, self._scale, self._best, self._best_row, self._space,
            cooling,
        )  # fmt: skip
        return cooling.num_moves if cooling.stop[0] == 0 else None

    def bring(self, search: Search) -> None:
        search.take(self._best, self._best_row, "justified")


class PerturbationSearch(Trials):
    """One thread's justification of the best order so far, with random changes at its ends. Temperatures are shares
    of the makespan."""

    MOVES, HOT, COLD = (math.inf, 1e6), 0.004, 0.00016

    def begin(self, search: Search, until: float) -> None:
        super().begin(search, until)
        self._kept = np.empty(self._problem.queues.num_ops)
        self._now = time_of(self._problem, search.row, self._kept)

    def move(self, cooling: Cooling, done: float) -> int:
        self._now, self._best, moved = self._module.shaken(
            self._problem.queues, self._back, self._scale, self._now, self._kept, self._best, self._best_row,
            self._space, cooling,
        )  # fmt: skip
        return int(moved)


class RowWalk(Annealer[S]):
    """Step 3: local search, one thread's walk from the best orders so far, over rows of ops."""

    MODULE = row_walk

    def __init__(self, problem: Any, ops: Ops, seed: int) -> None:
        super().__init__(problem, seed)
        self._ops, self._space = ops, WalkSpace.of(ops)
        self.orders, self._undo, self.best_orders = (Orders.of(ops) for _ in range(3))
        self._now = self.best = math.inf

    def _begin(self) -> None:
        """Takes up the rows and forms of `orders`."""
        self._module.set_forms(self._ops, self.orders)
        for r in range(len(self._ops.cap)):
            self._module.fits(self._ops, self.orders, r)
        for mine in (self._undo, self.best_orders):
            for array, given in zip(mine, self.orders, strict=True):
                array[:] = given
        self._now = self.best = float(self._module.timed(self._ops, self.orders, self._space.start))

    def move(self, cooling: Cooling, done: float) -> int:
        self._now, self.best, moved = self._module.anneal(
            self._ops, self.orders, self._undo, self.best_orders, self._space, self._now, self.best, cooling
        )
        return int(moved)


class Walk(RowWalk[Search]):
    """The walk where every op has one form. Temperatures are shares of the mean duration of an op.

    It is stuck where no pair on the critical path can change places.
    """

    MOVES, HOT, COLD, BEGINNING = (50_000.0, 2e7), 0.6, 0.12, 5e-6

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, walk_ops(problem), seed)
        self._problem = problem
        self._queue_of = np.empty(len(self._ops.chain), np.int64)
        self._first = walk_first(problem, self._ops.first)
        self._queue_of[self._first[problem.queue_of] + problem.number_of] = problem.queue_of

    @property
    def unit(self) -> float:
        return mean_duration(self._problem)

    def begin(self, search: Search, until: float) -> None:
        queues = self._problem.queues
        op = self._first[search.row] + self._problem.numbers(search.row)
        for r in range(queues.num_ranks):
            mine = op[queues.row_first[r] : queues.row_first[r + 1]]
            self.orders.row[r, : len(mine)], self.orders.length[r] = mine, len(mine)
        self.orders.whole[:] = "B" in self._problem.kind
        self._begin()

    def bring(self, search: Search) -> None:
        if self.best < search.value:
            made = self.best_orders
            ops = np.concatenate([row[:length] for row, length in zip(made.row, made.length, strict=True)])
            search.take(self.best, self._queue_of[ops], "local search")
