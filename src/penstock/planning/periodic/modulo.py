"""Modulo scheduling with CP-SAT: repetends of a given period. Later ones have a shorter latency.

A block's start is written as

    start = period * quotient + position            0 <= position < period

Positions decide who runs when within a period and must not clash modulo the period; quotients say how many turns
apart two blocks of one period are. Needs order starts, ranks order positions: one yes-or-no variable for each
pair of blocks with a rank in common says which comes first in the period. A cap on what a rank holds is linear
in these same variables: when block t starts, as many turns have run block b of the same rank before it as

    quotient_t - quotient_b + (1 if position_b < position_t else 0)

and each of them took what b acquires and, since blocks of a rank don't overlap, gave back what it releases.

CP-SAT needs whole numbers. Durations and delays that are whole multiples of a common unit, at most 10,000 units a
period, are exact; others are rounded to the nearest 1/2,000 of the rank with most work, at least to one such
unit. Rounding can make the order found a little worse, and nothing wrong: orders are retimed with the exact
durations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

from penstock.engine.tolerance import EPSILON
from penstock.planning.periodic.model import Flow, Repetend
from penstock.schedule import ScheduleError

MOST_EXACT_UNITS, ROUNDED_UNITS = 10_000, 2_000
_MEMORY_UNITS = 1_000_000


def cp_sat() -> ModuleType:
    """The solver's module.

    Raises:
        ScheduleError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError(
            "this plan needs the CP-SAT solver, which is not installed: pip install 'penstock[exact]'", rule="exact"
        ) from None
    module: ModuleType = cp_model
    return module


@dataclass(frozen=True)
class IntegerTimes:
    """A flow's durations and delays as whole numbers of `unit` ms; `exact` where nothing was rounded."""

    unit: float
    durations: tuple[int, ...]
    delays: tuple[tuple[int, ...], ...]
    exact: bool

    def ceil(self, time: float) -> int:
        """The least number of units that is no shorter than `time` ms, but for rounding errors."""
        return math.ceil(time / self.unit - 1e-6)


def units_of(flow: Flow) -> IntegerTimes:
    """Chooses the unit: see the file's head."""
    times = [b.duration for b in flow.blocks] + [need.delay for b in flow.blocks for need in b.needs]
    work = max(flow.work)
    common = common_unit(times)
    exact = common is not None and work <= MOST_EXACT_UNITS * common
    unit = common if exact and common is not None else (work / ROUNDED_UNITS or 1.0)

    def whole(time: float) -> int:
        return max(1, round(time / unit)) if time > 0 else 0

    delays = tuple(tuple(whole(need.delay) for need in b.needs) for b in flow.blocks)
    return IntegerTimes(unit, tuple(whole(b.duration) for b in flow.blocks), delays, exact)


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


def memory_unit(flow: Flow, rank: int, cap: float) -> float:
    """The unit in which what `rank` holds is counted: exact where it can be, else a millionth of the cap."""
    held = [what for b in flow.on_rank[rank] for what in (flow.blocks[b].acquires, flow.blocks[b].releases)]
    common = common_unit([cap, *held])
    return common if common is not None and cap <= _MEMORY_UNITS * common else cap / _MEMORY_UNITS


def find_repetends(
    flow: Flow,
    units: IntegerTimes,
    period: int,
    caps: list[float],
    seconds: float,
    found: Callable[[Repetend], bool],
    *,
    hint: Repetend | None = None,
    seed: int = 0,
    num_workers: int = 2,
) -> bool:
    """Looks for repetends of `period` units and hands each to `found`, which says whether to go on.

    Each has a shorter latency than the one before.

    Args:
        caps: most activations each rank may hold, in the units of the blocks.
        seconds: after which it stops.
        hint: one to begin from, of about this period.

    Returns:
        False if it is proved that there is none.
    """
    cp = cp_sat()
    model = _Model(cp, flow, units, period, caps)
    if hint is not None:
        model.begin_from(hint)

    def each(value: Callable[[Any], int]) -> bool:
        return found(Repetend(flow, period * units.unit, tuple(value(start) * units.unit for start in model.starts)))

    status, _ = solve(model.model, seconds, seed=seed, num_workers=num_workers, found=each)
    return bool(status != cp.INFEASIBLE)


def solve(
    model: Any,
    seconds: float,
    *,
    seed: int = 0,
    num_workers: int = 2,
    found: Callable[[Callable[[Any], int]], bool] | None = None,
) -> tuple[Any, Callable[[Any], int]]:
    """Solves a CP-SAT model; returns its status, and what gives the value of an expression in the best solution.

    The solver runs in a thread of its own, so that Ctrl-C is noticed at once.

    Args:
        found: called at each solution with what gives the value of an expression in it; says whether to go on.
    """
    cp = cp_sat()
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.001)
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    failures: list[BaseException] = []

    class SolutionCallback(cp.CpSolverSolutionCallback):  # type: ignore[name-defined]
        def on_solution_callback(self) -> None:
            try:
                if found is not None and not found(self.value):
                    self.stop_search()
            except BaseException as failure:  # must not cross the solver, which is not Python
                failures.append(failure)
                self.stop_search()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(solver.solve, model, None if found is None else SolutionCallback())
        try:
            status = future.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise
    if failures:
        raise failures[0]
    if status == cp.MODEL_INVALID:
        raise AssertionError(model.validate())
    return status, solver.value


class _Model:
    """The variables and what holds between them."""

    def __init__(self, cp: ModuleType, flow: Flow, units: IntegerTimes, period: int, caps: list[float]) -> None:
        self.flow, self.units, self.period = flow, units, period
        self.model: Any = cp.CpModel()
        blocks = range(len(flow.blocks))
        most = len(flow.blocks) + sum(units.durations) // period
        self.positions = [self.model.new_int_var(0, period - 1, "") for _ in blocks]
        self.quotients = [self.model.new_int_var(0, 2 * most, "") for _ in blocks]
        self.starts = [period * self.quotients[b] + self.positions[b] for b in blocks]
        self.before: dict[tuple[int, int], Any] = {}
        # Time may begin anywhere in the period.
        self.model.add(self.positions[0] == 0)
        self._order_by_needs()
        self._order_by_ranks()
        for rank, cap in enumerate(caps):
            if cap < math.inf:
                self._limit(rank, cap)
        latency = self.model.new_int_var(0, 2 * (most + 1) * period, "")
        for b in blocks:
            self.model.add(latency >= self.starts[b] + units.durations[b])
        self.model.minimize(latency)

    def begin_from(self, hint: Repetend) -> None:
        """Tells the solver where to look first."""
        origin = hint.starts[0] % hint.period
        for b, start in enumerate(hint.starts):
            quotient = math.floor((start - origin) / hint.period + EPSILON)
            position = round((start - origin - quotient * hint.period) / self.units.unit)
            self.model.add_hint(self.positions[b], min(max(position, 0), self.period - 1))
            self.model.add_hint(self.quotients[b], quotient)

    def _order_by_needs(self) -> None:
        for b, block in enumerate(self.flow.blocks):
            for need, delay in zip(block.needs, self.units.delays[b], strict=True):
                self.model.add(self.starts[b] >= self.starts[need.block] + self.units.durations[need.block] + delay)

    def _order_by_ranks(self) -> None:
        model, positions, durations, period = self.model, self.positions, self.units.durations, self.period
        for row in self.flow.on_rank:
            for a, b in itertools.combinations(row, 2):
                if (a, b) in self.before:
                    continue
                first = model.new_bool_var("")
                self.before[a, b], self.before[b, a] = first, ~first
                for one, other, when in ((a, b, first), (b, a, ~first)):
                    model.add(positions[one] + durations[one] <= positions[other]).only_enforce_if(when)
                    model.add(positions[other] + durations[other] <= positions[one] + period).only_enforce_if(when)
            # Said twice, as the pairs imply it; it lets the solver reason about a rank as a whole.
            model.add_no_overlap(
                model.new_fixed_size_interval_var(positions[b] + shift, durations[b], "")
                for b in row
                for shift in (0, period)
                if durations[b] > 0
            )

    def _limit(self, rank: int, cap: float) -> None:
        blocks, row = self.flow.blocks, self.flow.on_rank[rank]
        unit = memory_unit(self.flow, rank, cap)
        acquires = {b: math.ceil(blocks[b].acquires / unit - 1e-3) for b in row}
        changes = {b: acquires[b] - math.floor(blocks[b].releases / unit + 1e-3) for b in row}
        if giving := [b for b in row if blocks[b].releases > 0]:
            changes[giving[-1]] -= sum(changes.values())  # rounding must not let anything pile up
        for t in row:
            if acquires[t] == 0:
                continue
            held: Any = acquires[t]
            for b in row:
                if b != t and changes[b]:
                    held += changes[b] * (self.quotients[t] - self.quotients[b] + self.before[b, t])
            self.model.add(held <= math.floor(cap / unit + 1e-3))
