"""Exact solving by CP-SAT (ortools, extra `exact`): up to about 800 ops it often proves the best schedule.

An interval an op, no overlap on a rank, each queue in order (without loss of generality, see `problem`). Where a
rank hosts one stage and its memory is freed at one op alone, the cap M is one more precedence: F(j + M) after the
W (or B) of j. Where I frees a part of it, or a rank hosts several stages, memory is a cumulative constraint in the
largest unit of which all amounts are whole multiples. Starts lie between heads and the horizon less tails.

The solver is not asked for the least makespan but, for one horizon after another, whether any schedule ends by then:
narrow windows make both answers come sooner. Only where a rank hosts several stages is it asked for the least first,
from the best order on and in few steps of time: there it goes on from what it has.

Times are counted in the largest unit of which all are whole multiples: the fewer steps, the sooner the answers, and a
no says that at least one step more is needed. Without such a unit times are rounded down to a ten-millionth of the
horizon, and amounts of memory to a millionth of the cap: a no holds for the true numbers too, and the orders found
are timed again and taken only if they keep to the cap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.planning.bounds import heads_and_tails, work_is_cheap
from penstock.planning.problem import Problem, fits
from penstock.planning.search import Search, time_of
from penstock.planning.span_objective import Span
from penstock.planning.threads import MOST_THREADS, num_cores

MOST_OPS = 1000
"""Above this CP-SAT finds and proves nothing in the time that local search needs."""

_STEPS = 10_000_000
"""Parts of a horizon that times are counted in at most."""

ROUGH_STEPS = (8_000, 40_000, 200_000)
"""Parts of a makespan that times are counted in where the least is asked for: roughly first."""

_MEMORY_STEPS = 1_000_000
"""Parts of a cap that amounts of memory are counted in at most."""

_FIRST_SHARE = 0.005
"""How far below the best the first horizon lies: refuted, it proves that gap."""

_FIRST_SECONDS = 2.0
"""What a question may take at first."""

STOPPING = 0.05
"""Seconds that CP-SAT takes to come to its end when it is stopped."""

_NEAR_WHOLE = 1e-6
"""A number this near a whole one is that: what differs is rounding."""

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


@dataclass(frozen=True)
class TimeGrid:
    """Times as whole numbers of `unit` ms, `steps` till the horizon; `exact` where they are so without rounding."""

    unit: float
    steps: int
    exact: bool

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


def _clock(problem: Problem, horizon: float, num_steps: int) -> TimeGrid:
    queues = problem.queues
    return clock_of({float(time) for times in (queues.duration, queues.delay) for time in times}, horizon, num_steps)


def clock_of(times: set[float], horizon: float, num_steps: int = _STEPS) -> TimeGrid:
    """Counts times in the largest unit of which they are whole multiples, or in parts of the horizon (ms)."""
    unit = common_unit(times)
    if unit is None or horizon > num_steps * unit:
        return TimeGrid(horizon / num_steps, num_steps, exact=False)
    return TimeGrid(unit, math.floor(horizon / unit + _NEAR_WHOLE), exact=True)


def available() -> bool:
    """Whether ortools is there."""
    import importlib.util

    return importlib.util.find_spec("ortools") is not None


def lessen(search: Search, until: float) -> None:
    """Asks for the least makespan, from the best order on, until `until` (seconds since the search began).

    First in few steps of time, which closes in on it, then in more, which proves it. Where several stages of a rank
    share its memory this finds and proves more than questions of one horizon after another.
    """
    num_workers = max(2, min(MOST_THREADS, num_cores()))
    until -= STOPPING
    for number, num_steps in enumerate(ROUGH_STEPS):
        if search.closed or search.seconds >= until:
            return
        answer = least(
            search.problem, search.row, num_steps, until - search.seconds, search.seed + number, num_workers
        )
        if answer.row is not None:
            search.take(time_of(search.problem, answer.row), answer.row, "exact")
        search.improve_bound(answer.bound)
        search.report("exact")


def common_unit(values: Iterable[float]) -> float | None:
    """The largest number of which all `values` (at least 0) are whole multiples; None where none is found."""
    common = Fraction(0)
    for value in values:
        fraction = Fraction(value).limit_denominator(1_000_000)
        if not math.isclose(float(fraction), value, rel_tol=1e-12):
            return None
        top = math.gcd(common.numerator * fraction.denominator, fraction.numerator * common.denominator)
        common = Fraction(top, common.denominator * fraction.denominator)
    return float(common) or None


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
    num_workers = max(2, min(MOST_THREADS, num_cores()))
    while not search.closed and search.seconds < until:
        horizon = max(search.value / (1 + share), search.lower_bound * (1 + EPSILON))
        if unanswered <= horizon:
            horizon = (search.lower_bound + unanswered) / 2
        most = min(until - search.seconds, seconds)
        answer = within(search.bounded, horizon, most, seed, num_workers, span=search.span)
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


def within(
    problem: Problem, horizon: float, seconds: float, seed: int = 0, num_workers: int = 2, span: Span | None = None
) -> SolverAnswer:
    """Looks for a schedule that ends by `horizon` (ms), for at most `seconds`.

    With `span`, whose bounded problem is given: for one whose span is at most `horizon` less its shift.
    """
    began = time.perf_counter()
    clock = _clock(problem, horizon, _STEPS)
    made = _modelled(problem, clock, span)
    if made is None:
        return SolverAnswer(None, clock.refuted)
    return _answer(problem, made, clock, solver_of(seed, num_workers), seconds - (time.perf_counter() - began))


def least(problem: Problem, row: Array, num_steps: int, seconds: float, seed: int, num_workers: int) -> SolverAnswer:
    """The least makespan, from the order `row` on: a better order, and what none is shorter than.

    Args:
        num_steps: of the makespan of `row`, in which times are counted where they have no common unit: few, and
            answers come soon and are rough.
    """
    began = time.perf_counter()
    start = np.empty(problem.queues.num_ops)
    clock = _clock(problem, time_of(problem, row, start), num_steps)
    made = _modelled(problem, clock, None)
    if made is None:
        return SolverAnswer(None, clock.refuted)
    makespan = made.model.new_int_var(0, clock.steps, "")
    queues = problem.queues
    for q, (mine, long) in enumerate(zip(made.starts, made.duration, strict=True)):
        for j, begin in enumerate(mine):
            made.model.add_hint(begin, clock.length(start[queues.op_first[q] + j]))
        if mine:
            made.model.add(makespan >= mine[-1] + long + clock.length(queues.tail[queues.rank[q]]))
    made.model.minimize(makespan)
    solver = solver_of(seed, num_workers)
    solver.parameters.cp_model_probing_level, solver.parameters.symmetry_level = 2, 2
    return _answer(problem, made, clock, solver, seconds - (time.perf_counter() - began))


def _answer(problem: Problem, made: _OrderModel, clock: TimeGrid, solver: Any, seconds: float) -> SolverAnswer:
    """The solver's answer for a model, within so many seconds."""
    status = answered(solver, made.model, seconds).name if seconds > 0 else "UNKNOWN"
    if status == "INFEASIBLE":
        return SolverAnswer(None, clock.refuted)
    if status not in ("OPTIMAL", "FEASIBLE"):
        return SolverAnswer(None)
    bound = clock.above(solver.best_objective_bound) if made.model.has_objective() else 0.0
    return SolverAnswer(_order_found(problem, made, solver), bound)


class _OrderModel(NamedTuple):
    """CP-SAT's model: the start of each queue's ops, and how long each of them takes, in steps of the clock."""

    model: Any
    starts: list[list[Any]]
    duration: list[int]


def _modelled(problem: Problem, clock: TimeGrid, span: Span | None) -> _OrderModel | None:
    """The model of all schedules that end by the clock's last step; None where there are none."""
    from ortools.sat.python import cp_model

    queues = problem.queues
    model: Any = cp_model.CpModel()
    head, tail = heads_and_tails(problem, work=work_is_cheap(problem))
    duration = [clock.length(d) for d in queues.duration]
    starts: list[list[Any]] = []
    for q in range(len(queues.rank)):
        first, size = int(queues.op_first[q]), int(queues.size[q])
        mine = []
        for j in range(size):
            earliest = clock.least(head[first + j])
            latest = clock.steps - duration[q] - clock.least(tail[first + size - 1 - j])
            if latest < earliest:
                return None
            mine.append(model.new_int_var(earliest, latest, ""))
        starts.append(mine)
    for q in range(len(queues.rank)):
        message, local = int(queues.message_from[q]), int(queues.local_from[q])
        for j, begin in enumerate(starts[q]):
            if j:
                model.add(begin >= starts[q][j - 1] + duration[q])
            if message >= 0:
                model.add(begin >= starts[message][j] + duration[message] + clock.length(queues.delay[q]))
            if local >= 0:
                model.add(begin >= starts[local][j] + duration[local])
    for r in range(queues.num_ranks):
        mine_queues = range(queues.rank_first[r], queues.rank_first[r + 1])
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(begin, duration[q], "") for q in mine_queues for begin in starts[q]]
        )
        _memory(model, problem, r, starts, duration, clock)
    if span is not None and not span.fixed:
        _first_starts(model, problem, span, starts, duration, clock)
    return _OrderModel(model, starts, duration)


def solver_of(seed: int, num_workers: int) -> Any:
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = num_workers
    parameters.random_seed = seed
    # Learning clauses from the order of ops refutes in seconds what linear relaxations never do.
    parameters.subsolvers.extend(["no_lp", "quick_restart_no_lp"])
    parameters.use_dynamic_precedence_in_disjunctive = True
    parameters.cp_model_probing_level = 0  # probing and symmetries take longer than the answer
    parameters.symmetry_level = 0
    parameters.catch_sigint_signal = False
    return solver


def _order_found(problem: Problem, made: _OrderModel, solver: Any) -> Array | None:
    row = _row_of(problem, [[solver.value(begin) for begin in mine] for mine in made.starts])
    runs = time_of(problem, row) >= 0 and fits(problem, row)  # not always, where ops of no length start together
    return row if runs else None


def _first_starts(
    model: Any, problem: Problem, span: Span, starts: list[list[Any]], duration: list[int], clock: TimeGrid
) -> None:
    """A rank must end in time after its own first start, which is one of those it may begin with.

    Where nothing can hold that one up it starts at once. Where times are rounded down the difference may come out a
    step too long: that step is given back.
    """
    queues = problem.queues
    for r, firsts in enumerate(span.firsts):
        if not firsts:
            continue
        begun = model.new_int_var(0, clock.steps, "")
        chosen = [model.new_bool_var("") for _ in firsts]
        model.add_bool_or(chosen)
        for first, this in zip(firsts, chosen, strict=True):
            start = starts[first.queue][0]
            model.add(begun <= start)
            model.add(begun == start).only_enforce_if(this)
            if first.fixed:
                model.add(start <= clock.most(first.start)).only_enforce_if(this)
        for q in range(queues.rank_first[r], queues.rank_first[r + 1]):
            if queues.size[q] > 0:
                end = starts[q][-1] + duration[q]
                model.add(end - begun <= clock.steps - clock.length(span.shift) + (0 if clock.exact else 1))


def answered(solver: Any, model: Any, seconds: float) -> Any:
    """Solves on another thread, so that time's end and interrupts, which reach this one, stop it at once."""
    seconds = max(seconds, 0.01)
    solver.parameters.max_time_in_seconds = seconds
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(solver.solve, model)
        try:
            return asked.result(timeout=seconds)
        except TimeoutError:
            solver.stop_search()
            return asked.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _memory(
    model: Any, problem: Problem, r: int, starts: list[list[Any]], duration: list[int], clock: TimeGrid
) -> None:
    """Caps what rank r holds, or somewhat less than that: no order that keeps to the cap is ruled out."""
    queues = problem.queues
    cap = float(queues.cap[r])
    mine = [q for q in range(queues.rank_first[r], queues.rank_first[r + 1]) if queues.size[q] > 0]
    takers = [q for q in mine if queues.memory[q] > 0]
    if math.isinf(cap) or sum(float(queues.memory[q]) * int(queues.size[q]) for q in takers) <= cap:
        return
    givers = [q for q in mine if queues.memory[q] < 0]
    if len(takers) == 1 and len(givers) == 1:
        f, w = takers[0], givers[0]
        room = math.floor(cap / float(queues.memory[f]) * (1 + EPSILON))
        for j in range(room, len(starts[f])):
            model.add(starts[f][j] >= starts[w][j - room] + duration[w])
        return
    scale = memory_scale([-float(queues.memory[q]) for q in givers], cap)
    demands, intervals = [], []
    for q in givers:
        f = next(
            f for f in takers if (problem.stage[f], queues.pipeline[f]) == (problem.stage[q], queues.pipeline[q])
        )
        demand = math.floor(-float(queues.memory[q]) * scale * (1 + EPSILON))
        for begin, last in zip(starts[f], starts[q], strict=True):
            length = model.new_int_var(0, 2 * clock.steps, "")
            finish = last + duration[q]
            intervals.append(model.new_interval_var(begin, length, finish, ""))
            demands.append(demand)
    model.add_cumulative(intervals, demands, math.floor(cap * scale * (1 + EPSILON)))


def memory_scale(amounts: Sequence[float], cap: float) -> float:
    """What makes amounts of memory whole numbers; the cap becomes `_MEMORY_STEPS` at most, and just that where
    nothing makes them whole.

    The cap itself need not become whole: sums of whole amounts that keep to it keep to its whole part.
    """
    unit = common_unit(amounts)
    return 1 / unit if unit is not None and cap <= _MEMORY_STEPS * unit else _MEMORY_STEPS / cap


def _row_of(problem: Problem, starts: list[list[int]]) -> Array:
    """Queue ids by start, rank after rank; ops that start together (of no length) in queue order."""
    queues = problem.queues
    row: list[int] = []
    for r in range(queues.num_ranks):
        mine = range(queues.rank_first[r], queues.rank_first[r + 1])
        row += [q for _, _, q in sorted((begin, j, q) for q in mine for j, begin in enumerate(starts[q]))]
    return np.array(row, np.int64)
