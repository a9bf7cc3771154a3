"""The best schedule of a small problem by CP-SAT over one interval per op. It shares no code with penstock.

Plain numbers go in, and an instance says all that is assumed. No order within a stage is assumed: which microbatch
runs when is free, but that microbatches of one pipeline are alike and may be numbered by their first forward.

    rule        constraint
    rank        its ops do not overlap
    needs       F(s) before F(s + 1), the backward of s + 1 before that of s, with the delay between their ranks;
                on a stage F before I before W, or F before B
    memory      F takes `memory` at its start, I gives `freed_by_input` back at its end and W (or B) the rest
    value       the makespan, or the largest span: a rank's last end less its first start, where every op starts as
                soon as the order of its rank and its needs allow
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

Op = tuple[str, int, int]
"""Kind, stage, microbatch."""


@dataclass(frozen=True)
class Instance:
    """A problem in whole numbers.

    Attributes:
        pipelines: of each pipeline the rank of each stage; microbatch m belongs to pipeline m mod their number.
        num_microbatches: of all pipelines together.
        time: of each kind, F I W or F B, the duration on each stage, at least 1.
        delay: between two ranks, in one direction; 0 where not given.
        memory, freed_by_input: of each stage, what F takes and what of it I gives back.
        cap: of each rank, None where there is none.
        objective: "makespan" or "span".
    """

    pipelines: tuple[tuple[int, ...], ...]
    num_microbatches: int
    time: Mapping[str, Sequence[int]]
    delay: Mapping[tuple[int, int], int]
    memory: Sequence[int]
    freed_by_input: Sequence[int]
    cap: Sequence[int | None]
    objective: str = "makespan"


@dataclass(frozen=True)
class Solved:
    """The best value found and the best that was not refuted; they are equal where `proved`."""

    value: int | None
    bound: int
    proved: bool
    order: list[list[Op]] | None


def solve(instance: Instance, seconds: float = 60.0, num_workers: int = 1) -> Solved:
    """Solves an instance; without a value where no schedule was found, and proved where there is none."""
    model: Any = cp_model.CpModel()
    kinds = ["F", "I", "W"] if "W" in instance.time else ["F", "B"]
    num_stages, num_pipelines = len(instance.memory), len(instance.pipelines)
    hosts = [instance.pipelines[m % num_pipelines] for m in range(instance.num_microbatches)]
    ops = [(k, s, m) for m in range(instance.num_microbatches) for s in range(num_stages) for k in kinds]
    long = {(k, s, m): instance.time[k][s] for k, s, m in ops}
    rank = {(k, s, m): hosts[m][s] for k, s, m in ops}
    needs = {op: _needs(op, kinds, num_stages, rank, instance.delay) for op in ops}
    horizon = sum(long.values()) + sum(lag for of_op in needs.values() for _, lag in of_op)
    start = {op: model.new_int_var(0, horizon, "") for op in ops}
    rows: dict[int, list[Op]] = {}
    for op in ops:
        rows.setdefault(rank[op], []).append(op)
    for op in ops:
        for before, lag in needs[op]:
            model.add(start[op] >= start[before] + long[before] + lag)
    for m in range(num_pipelines, instance.num_microbatches):
        model.add(start["F", 0, m] >= start["F", 0, m - num_pipelines])
    for r, row in rows.items():
        model.add_no_overlap(model.new_fixed_size_interval_var(start[op], long[op], "") for op in row)
        cap = instance.cap[r]
        if cap is not None:
            _hold(model, instance, row, kinds, start, long, cap, horizon)
    value = model.new_int_var(0, horizon, "")
    if instance.objective == "makespan":
        for op in ops:
            model.add(value >= start[op] + long[op])
    else:
        for op in ops:
            _start_at_once(model, op, needs[op], rows[rank[op]], start, long)
        for row in rows.values():
            first = model.new_int_var(0, horizon, "")
            model.add_min_equality(first, [start[op] for op in row])
            for op in row:
                model.add(value >= start[op] + long[op] - first)
    model.minimize(value)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(model.validate())
    if status == cp_model.INFEASIBLE:
        return Solved(None, horizon, True, None)
    if status == cp_model.UNKNOWN:
        return Solved(None, int(solver.best_objective_bound), False, None)
    order = [sorted(rows.get(r, []), key=lambda op: solver.value(start[op])) for r in range(len(instance.cap))]
    bound = round(solver.best_objective_bound)
    return Solved(round(solver.objective_value), bound, status == cp_model.OPTIMAL, order)


def _needs(
    op: Op, kinds: list[str], num_stages: int, rank: Mapping[Op, int], delay: Mapping[tuple[int, int], int]
) -> list[tuple[Op, int]]:
    """What an op waits for, and how much later than its end."""
    kind, stage, m = op
    found: list[tuple[Op, int]] = []
    if kind == "F":
        messages = [("F", stage - 1, m)] if stage > 0 else []
    elif kind == kinds[1]:
        messages = [(kind, stage + 1, m)] if stage + 1 < num_stages else []
        found.append((("F", stage, m), 0))
    else:
        messages = []
        found.append((("I", stage, m), 0))
    return found + [(before, delay.get((rank[before], rank[op]), 0)) for before in messages]


def _hold(
    model: Any,
    instance: Instance,
    row: list[Op],
    kinds: list[str],
    start: Mapping[Op, Any],
    long: Mapping[Op, int],
    cap: int,
    horizon: int,
) -> None:
    """From the start of F what I frees is held to the end of I, and the rest to the end of W (or B)."""
    intervals, amounts = [], []
    for kind, stage, m in row:
        if kind == "F":
            freed = instance.freed_by_input[stage] if "I" in kinds else 0
            for amount, last in ((freed, ("I", stage, m)), (instance.memory[stage] - freed, (kinds[-1], stage, m))):
                if amount > 0:
                    held = model.new_int_var(0, horizon, "")
                    end = start[last] + long[last]
                    intervals.append(model.new_interval_var(start[kind, stage, m], held, end, ""))
                    amounts.append(amount)
    model.add_cumulative(intervals, amounts, cap)


def _start_at_once(
    model: Any,
    op: Op,
    needs: list[tuple[Op, int]],
    row: list[Op],
    start: Mapping[Op, Any],
    long: Mapping[Op, int],
) -> None:
    """An op starts at 0, as something it needs arrives, or as another op of its rank ends."""
    moments: list[Any] = [0] if not needs else []
    moments += [start[before] + long[before] + lag for before, lag in needs]
    needed = {before for before, _ in needs}
    moments += [start[other] + long[other] for other in row if other != op and other not in needed]
    chosen = [model.new_bool_var("") for _ in moments]
    for moment, this in zip(moments, chosen, strict=True):
        model.add(start[op] == moment).only_enforce_if(this)
    model.add_bool_or(chosen)
