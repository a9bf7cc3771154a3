"""The search for a plan, the cheapest step first: bound, greedy, justification, local search, exact solving.

Each step keeps the best orders so far. It stops as soon as they are proved good enough or the time is spent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine import list_by_values, sweep
from penstock.engine.compiled import compiled
from penstock.engine.list_by_values import ListSpace
from penstock.engine.network import Array
from penstock.planning import forward_backward, row_walk
from penstock.planning.annealing import Annealer, S
from penstock.planning.bounds import op_arrays
from penstock.planning.in_step import in_step
from penstock.planning.metropolis import Cooling
from penstock.planning.op_arrays import OpArrays
from penstock.planning.problem import BACKWARD_CLASS, Problem, fits, walk_ops
from penstock.planning.progress import Incumbent
from penstock.planning.row_walk import Ops, Orders, WalkSpace
from penstock.planning.threads import is_quick
from penstock.schedule import Schedule

if TYPE_CHECKING:
    from penstock.planning.span_objective import Span

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
        """By how many ms value and bound are above those of the objective (see `span_objective`)."""
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
    swapped = np.where(classes == BACKWARD_CLASS, classes, 3 - classes)
    return np.stack([classes, swapped])


def list_by_class(problem: Problem, classes: Array, space: ListSpace) -> float:
    """List scheduling by class, then by microbatch. The result is in `space.row`."""
    queues = problem.queues
    class_value = classes * (queues.size.max(initial=0) + 1)
    space.values[:] = np.arange(queues.num_ops) + np.repeat(class_value - queues.op_first[:-1], queues.size)
    space.wait[:] = 0.0
    module: Any = compiled(list_by_values)
    return float(module.list_ops(queues, space, False, False))


def greedy(search: Search) -> None:
    """Step 1, from which on there is a plan, however short the time: backward before forward before weight gradients.
    Microbatches go in step if that gets stuck, or if it would take too long without machine code.
    """
    problem, space = search.problem, ListSpace.of(search.problem.queues)
    listed = -1.0
    if is_quick(problem.queues.num_ops):
        listed = list_by_class(problem, problem.priority_class, space)
    if listed >= 0:
        search.take(listed, space.row, "greedy")
    else:
        stepwise(search)
    search.report("greedy")


def stepwise(search: Search) -> None:
    """Takes orders in which microbatches begin at even intervals, and the first of them however little time is
    left.
    """
    for row in in_step(search.problem):
        search.take(time_of(search.problem, row), row, "in step")
        if search.closed or search.left <= 0:
            break


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
        for q, first in enumerate(problem.walk_first.tolist()):
            self._queue_of[first : first + problem.queues.size[q]] = q

    @property
    def unit(self) -> float:
        return mean_duration(self._problem)

    def begin(self, search: Search, until: float) -> None:
        queues = self._problem.queues
        op = self._problem.walk_first[search.row] + self._problem.numbers(search.row)
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
