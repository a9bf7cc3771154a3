"""Exact solving by CP-SAT (ortools, extra `exact`): up to about 800 ops it often proves the best schedule.

The model:

    op        an interval on its rows, no earlier than its head, and its tail before the horizon. Which form it has
              may be left to the solver: then it takes one time or another, or is not there
    row       its ops do not overlap
    need      an op starts when another has ended and its message is there
    memory    an op takes some at its start or gives it back at its end, and a row holds no more than its cap. Where
              it is known which op gives back what which other took, the time in between is an interval: of a few
              hundred ops that proves and finds more than changes alone do
    asked     the least makespan, or whether any order ends by the horizon

Times are counted in the largest unit of which all are whole multiples: the fewer steps, the sooner the answers, and
a no says that at least one step more is needed. Without such a unit times are rounded down to a part of the horizon,
and amounts of memory to a millionth of the cap: a no holds for the true numbers too, and the orders found are timed
again and taken only if they keep to the cap.

The solver is asked for the least makespan, from the best order on: first in few steps of time, which closes in on it,
then in more, which proves it. Where a rank hosts one stage and its memory is freed at one op alone, its cap is one
more need: F(j + M) after the W (or B) of j.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.tolerance import EPSILON
from penstock.host_process import num_cores
from penstock.planning.annealing import MOST_THREADS
from penstock.planning.bounds import OpArrays
from penstock.planning.problem import Problem
from penstock.planning.search import Search, Span

if TYPE_CHECKING:
    from penstock.planning.graph.search import GraphSearch


_STEPS = 10_000_000
"""Parts of a horizon that times are counted in at most."""

ROUGH_STEPS = (8_000, 40_000, 200_000)
"""Parts of a makespan that times are counted in where the least is asked for: roughly first."""

_MEMORY_STEPS = 1_000_000
"""Parts of a cap that amounts of memory are counted in at most."""

STOPPING = 0.05
"""Seconds that CP-SAT takes to come to its end when it is stopped."""

PROBING = 0.1
"""Seconds above which probing and the search for symmetries pay. Small problems that have less are answered sooner
without them."""

_NEAR_WHOLE = 1e-6
"""A number this near a whole one is that: what differs is rounding."""


def available() -> bool:
    """Whether ortools is there."""
    return importlib.util.find_spec("ortools") is not None


@dataclass(frozen=True)
class TimeGrid:
    """Times as whole numbers of `unit` ms, `steps` till the horizon; `exact` where they are so without rounding."""

    unit: float
    steps: int
    exact: bool

    @classmethod
    def of(cls, times: Iterable[float], horizon: float, num_steps: int = _STEPS) -> TimeGrid:
        """Counts times in the largest unit of which they are whole multiples, or in parts of the horizon (ms)."""
        unit = common_unit(times)
        if unit is None or horizon > num_steps * unit:
            return cls(horizon / num_steps, num_steps, exact=False)
        return cls(unit, math.floor(horizon / unit + _NEAR_WHOLE), exact=True)

    def length(self, ms: float) -> int:
        return round(ms / self.unit) if self.exact else math.floor(ms / self.unit)

    def least(self, ms: float) -> int:
        """Of a time that something takes at least: the first step that it may be."""
        return math.ceil(ms / self.unit - _NEAR_WHOLE) if self.exact else math.floor(ms / self.unit * (1 - EPSILON))

    def most(self, ms: float) -> int:
        return math.floor(ms / self.unit + _NEAR_WHOLE) if self.exact else math.ceil(ms / self.unit * (1 + EPSILON))

    def above(self, steps: float) -> float:
        """ms of a bound that the solver has in steps."""
        return math.ceil(steps - _NEAR_WHOLE) * self.unit

    @property
    def refuted(self) -> float:
        """ms that no schedule ends before, where none ends by the last step."""
        return (self.steps + self.exact) * self.unit


def common_unit(values: Iterable[float]) -> float | None:
    """The largest number of which all `values` (at least 0) are whole multiples; None where none is found."""
    common = Fraction(0)
    for value in set(values):
        fraction = Fraction(value).limit_denominator(1_000_000)
        if not math.isclose(float(fraction), value, rel_tol=1e-12):
            return None
        top = math.gcd(common.numerator * fraction.denominator, fraction.numerator * common.denominator)
        common = Fraction(top, common.denominator * fraction.denominator)
    return float(common) or None


class ModelOp(NamedTuple):
    """An op of the model.

    Attributes:
        start, end: in steps.
        present: the literal that says whether it is there.
        over: what ends no later than the makespan.
    """

    start: Any
    end: Any
    present: Any
    over: tuple[Any, ...]


class ModelAnswer(NamedTuple):
    """What the solver says: whether it found an order or proved that there is none, and ms that none ends before."""

    found: bool
    refuted: bool
    bound: float


class OrderModel:
    """Ops, needs and memory, as CP-SAT takes them."""

    def __init__(self, grid: TimeGrid) -> None:
        from ortools.sat.python import cp_model

        self.grid = grid
        self.model: Any = cp_model.CpModel()
        self._rows: defaultdict[Any, list[Any]] = defaultdict(list)
        self._changes: defaultdict[Any, list[tuple[Any, float]]] = defaultdict(list)
        self._held: defaultdict[Any, list[tuple[Any, float]]] = defaultdict(list)
        self._is_possible = self._all_there = True
        self._solver: Any = None
        self.yes = self.model.new_constant(1)
        """The literal of what is always so."""

    def choice(self, free: bool = True, otherwise: bool = False) -> Any:
        """A literal that the solver chooses; one that is fixed where it is not `free`."""
        return self.model.new_int_var(int(otherwise and not free), int(otherwise or free), "")

    def moment(self) -> Any:
        """Some step up to the horizon."""
        return self.model.new_int_var(0, self.grid.steps, "")

    def op(
        self, ms: float, rows: Iterable[Any], head: float = 0.0, tail: float = 0.0, present: Any = None,
        form: tuple[Any, float] | None = None,
    ) -> ModelOp:  # fmt: skip
        """Adds an op.

        Args:
            rows: in all of which it stands.
            present: the literal that says whether it is there; it always is where not given.
            tail: where it has another form too, after the end of the shorter one.
            form: a literal, and how many ms it takes instead where that is so.
        """
        shortest = self.grid.length(ms)
        length: Any = shortest
        if form is not None:
            other = self.grid.length(form[1])
            length, shortest = length + (other - length) * form[0], min(shortest, other)
        low, high = self.grid.least(head), self.grid.steps - shortest - self.grid.least(tail)
        self._is_possible &= low <= high or present is not None
        start = self.model.new_int_var(low, max(low, high), "")
        end = start + length
        if form is not None:
            end = self.moment()
            self.model.add(end == start + length)
        if present is None:
            interval = self.model.new_interval_var(start, length, end, "")
        else:
            interval = self.model.new_optional_interval_var(start, length, end, present, "")
            self._all_there = False
        present = self.yes if present is None else present
        for row in rows:
            self._rows[row].append(interval)
        over = start + shortest + self.grid.least(tail)
        return ModelOp(start, end, present, (over,) if form is None else (over, end))

    def need(self, before: ModelOp, after: ModelOp, delay: float = 0.0, only_if: Any = None) -> None:
        """An op starts when another has ended and its message is there; or only where literals are true."""
        added = self.model.add(after.start >= before.end + self.grid.length(delay))
        if only_if is not None:
            added.only_enforce_if(only_if)

    def either(self, literal: Any, yes: Any, no: Any) -> Any:
        """The moment `yes` where a literal is true, else `no`."""
        moment = self.moment()
        self.model.add(moment == yes).only_enforce_if(literal)
        self.model.add(moment == no).only_enforce_if(literal.negated())
        return moment

    def change(self, row: Any, moment: Any, amount: float) -> None:
        """At a moment memory of a row is taken, or given back where the amount is below 0.

        Whether it is must not depend on a form, since CP-SAT 9.15 dies of some reservoirs whose changes are optional:
        give at the moment of taking what is not taken.
        """
        if amount != 0.0:
            self._changes[row].append((moment, amount))

    def hold(self, row: Any, begin: Any, end: Any, amount: float) -> None:
        """From one moment to another memory of a row is taken."""
        length = self.model.new_int_var(0, 2 * self.grid.steps, "")
        self._held[row].append((self.model.new_interval_var(begin, length, end, ""), amount))

    def limit(self, row: Any, cap: float) -> None:
        """Caps what a row holds, or somewhat less than that: no order that keeps to the cap is ruled out.

        Amounts become whole numbers. The cap itself need not: sums of whole amounts that keep to it keep to its whole
        part.
        """
        given = self._changes[row] or self._held[row]
        if math.isinf(cap) or sum(amount for _, amount in given if amount > 0) <= cap:
            return
        unit = common_unit(round(abs(amount), 12) for _, amount in given)
        scale = 1 / unit if unit is not None and cap <= _MEMORY_STEPS * unit else _MEMORY_STEPS / cap
        what, amounts = zip(*given, strict=True)
        whole = [math.floor(amount * scale + _NEAR_WHOLE) for amount in amounts]
        least, most = sum(min(0, amount) for amount in whole), math.floor(cap * scale * (1 + EPSILON))
        if self._held[row]:
            self.model.add_cumulative(what, whole, most)
        else:
            self.model.add_reservoir_constraint(what, whole, least, most)

    def add_ops(self, ops: OpArrays) -> list[ModelOp]:
        """Adds all ops of a problem that leaves no forms open, what they need, and what they hold."""
        of_op: list[list[int]] = [[] for _ in ops.duration]
        for row, mine in enumerate(ops.rows):
            for op in mine:
                of_op[op].append(row)
        made = [
            self.op(*each)
            for each in zip(ops.duration.tolist(), of_op, ops.head.tolist(), ops.tail.tolist(), strict=True)
        ]
        for before, after, delay in zip(ops.source.tolist(), ops.to.tolist(), ops.delay.tolist(), strict=True):
            self.need(made[before], made[after], delay)
        for row, (mine, cap) in enumerate(zip(ops.rows, ops.cap, strict=True)):
            for op in mine:
                if ops.taker is None:
                    self.change(row, made[op].start, float(ops.takes[op]))
                    self.change(row, made[op].end, -float(ops.gives[op]))
                elif ops.gives[op] > 0:
                    self.hold(row, made[ops.taker[op]].start, made[op].end, float(ops.gives[op]))
            self.limit(row, float(cap))
        return made

    def minimize(self, ops: Iterable[ModelOp], least: float = 0.0) -> Any:
        """Asks for the least makespan of ops, tails counted, which is known to be `least` (ms) at least.

        Returns the makespan, in steps.
        """
        makespan = self.model.new_int_var(min(self.grid.least(least), self.grid.steps), self.grid.steps, "")
        for op in ops:
            for over in op.over:
                self.model.add(makespan >= over).only_enforce_if(op.present)
        self.model.minimize(makespan)
        return makespan

    def hint(self, op: ModelOp, ms: float) -> None:
        """Where an op starts in the order that the solver begins with."""
        self.model.add_hint(op.start, self.grid.length(ms))

    def solve(self, seconds: float, seed: int, num_workers: int | None = None, probes: bool = False) -> ModelAnswer:
        """Solves on another thread, so that time's end and interrupts, which reach this one, stop it at once.

        Args:
            probes: whether probing and the search for symmetries, which take longer than most answers, are worth it.
        """
        if not self._is_possible:
            return ModelAnswer(False, True, self.grid.refuted)
        if seconds <= 0:
            return ModelAnswer(False, False, 0.0)
        for mine in self._rows.values():
            self.model.add_no_overlap(mine)
        solver = self._solver = _new_solver(seconds, seed, num_workers, probes)
        # Where an op may be absent this ends the process: "conflicting constraint at positive level" (ortools 9.15).
        solver.parameters.use_dynamic_precedence_in_disjunctive = self._all_there
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(solver.solve, self.model)
            try:
                status = asked.result(timeout=seconds)
            except TimeoutError:
                solver.stop_search()
                status = asked.result()
            except KeyboardInterrupt:
                solver.stop_search()
                raise
        if status.name == "INFEASIBLE":
            return ModelAnswer(False, True, self.grid.refuted)
        bound = self.grid.above(solver.best_objective_bound) if self.model.has_objective() else 0.0
        return ModelAnswer(status.name in ("OPTIMAL", "FEASIBLE"), False, max(0.0, bound))

    def value(self, what: Any) -> int:
        """What the order found has: a step, or 1 for a literal that is true."""
        return int(self._solver.value(what))


def _new_solver(seconds: float, seed: int, num_workers: int | None, probes: bool) -> Any:
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = max(seconds, 0.01)
    parameters.num_workers = max(2, min(MOST_THREADS, num_cores())) if num_workers is None else num_workers
    parameters.random_seed = seed
    # Learning clauses from the order of ops refutes in seconds what linear relaxations never do.
    parameters.subsolvers.extend(["no_lp", "quick_restart_no_lp"])
    parameters.cp_model_probing_level = parameters.symmetry_level = 2 if probes else 0
    parameters.catch_sigint_signal = False
    return solver


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
        left -= time.perf_counter() - began
        answer = model.solve(left, search.seed + number, probes=left > PROBING)
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
