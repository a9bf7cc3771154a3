"""The best schedule of a small problem by CP-SAT over one interval per op. It shares no code with penstock.

Plain numbers go in, and an instance says all that is assumed. Where forms are given and the makespan counts no order
within a stage is assumed: which microbatch runs when is free, but that microbatches of one pipeline are alike and may
be numbered by their first forward. Where forms are free, or the span counts, each stage of a pipeline runs its F, its
R, its backwards (I or B), and what adds to its weights' gradients (W or B) in the order of microbatches each, as
schedules must that declare no other. (The least makespan is the same either way. A span may be shorter where a rank
begins with a microbatch that comes late, since its time counts from there on.)

    rule        constraint
    rank        its ops do not overlap; nor do its offloads and reloads, which run beside its ops
    needs       F(s) before F(s + 1), the backward of s + 1 before that of s, with the delay between their ranks;
                on a stage F before I before W, or F before B; where R runs, after F and before I or B; where O (to
                host memory) and L (back) run, F before O before L before I or B
    memory      F takes `memory` at its start, I gives `freed_by_input` back at its end and W (or B) the rest; where R
                runs F takes `kept`, and R the rest at its start; O gives all of it back at its end, L takes it at its
                start, and in between it counts in host memory, from the start of O to the end of L
    value       the makespan, or the largest span: a rank's last end less its first start, where every op starts as
                soon as the order of its rank and its needs allow
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
        time: of each kind the duration on each stage, at least 1: F I W, or F B; with F I W B each backward is I and
            W, or B; with R each forward may run again; with O and L each activation may go to host memory.
        delay: between two ranks, in one direction; 0 where not given.
        memory, freed_by_input: of each stage, what F takes and what of it I gives back.
        cap: of each rank, None where there is none.
        objective: "makespan" or "span".
        kept: of each stage, what F takes where R runs.
        host: of each rank, the cap of its host memory; None where there is none.
        counts: how many microbatches each pipeline has; dealt in turn where empty.
        any_deal: whether microbatches may be dealt to the pipelines in any other way.
    """

    pipelines: tuple[tuple[int, ...], ...]
    num_microbatches: int
    time: Mapping[str, Sequence[int]]
    delay: Mapping[tuple[int, int], int]
    memory: Sequence[int]
    freed_by_input: Sequence[int]
    cap: Sequence[int | None]
    objective: str = "makespan"
    kept: Sequence[int] = ()
    host: Sequence[int | None] = ()
    counts: Sequence[int] = ()
    any_deal: bool = False

    @property
    def free(self) -> bool:
        """Whether forms are to be chosen."""
        return "R" in self.time or "O" in self.time or {"W", "B"} <= set(self.time)


@dataclass(frozen=True)
class Solved:
    """The best value found and the best that was not refuted; they are equal where `proved`."""

    value: int | None
    bound: int
    proved: bool
    order: list[list[Op]] | None


def solve(instance: Instance, seconds: float = 60.0, num_workers: int = 1) -> Solved:
    """Solves an instance; without a value where no schedule was found, and proved where there is none."""
    if instance.any_deal:
        return _best_deal(instance, seconds, num_workers)
    model: Any = cp_model.CpModel()
    kinds = ["F", "I", "W"] if "W" in instance.time else ["F", "B"]
    num_stages, num_pipelines = len(instance.memory), len(instance.pipelines)
    pipeline = [m % num_pipelines for m in range(instance.num_microbatches)]
    if instance.counts:
        pipeline = [p for p, count in enumerate(instance.counts) for _ in range(count)]
    hosts = [instance.pipelines[p] for p in pipeline]
    ops = [(k, s, m) for m in range(instance.num_microbatches) for s in range(num_stages) for k in kinds]
    rank = {(k, s, m): hosts[m][s] for k, s, m in ops}
    whole = {(s, m): model.new_bool_var("") if {"W", "B"} <= set(instance.time) else None for _, s, m in ops}
    again = {(s, m): model.new_bool_var("") if "R" in instance.time else None for _, s, m in ops}
    away = {(s, m): model.new_bool_var("") if "O" in instance.time else None for _, s, m in ops}
    long: dict[Op, Any] = {(k, s, m): instance.time[k][s] for k, s, m in ops}
    for (s, m), literal in whole.items():
        if literal is not None:
            long["I", s, m] = instance.time["I"][s] + (instance.time["B"][s] - instance.time["I"][s]) * literal
    needs = {op: _needs(op, kinds, num_stages, rank, instance.delay) for op in ops}
    # One op after the other, every form of it and every message.
    horizon = sum(max(of[s] for of in instance.time.values()) for _, s, _ in ops)
    for kind in "ROL":
        horizon += instance.num_microbatches * num_stages * max((*instance.time.get(kind, ()), 0))
    horizon += sum(lag for of_op in needs.values() for _, lag in of_op)
    start = {op: model.new_int_var(0, horizon, "") for op in ops}
    end = {op: model.new_int_var(0, horizon, "") for op in ops}
    present: dict[Op, Any] = {}
    """The literal of an op that is not always there."""
    rows: dict[int, list[Op]] = {}
    for op in ops:
        rows.setdefault(rank[op], []).append(op)
        model.add(end[op] == start[op] + long[op])
        if op[0] == "W" and whole[op[1:]] is not None:
            present[op] = whole[op[1:]].negated()
    for (s, m), literal in again.items():
        if literal is not None:
            op = ("R", s, m)
            long[op], rank[op], present[op], needs[op] = instance.time["R"][s], hosts[m][s], literal, []
            start[op], end[op] = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
            model.add(end[op] == start[op] + long[op])
            model.add(start[op] >= end["F", s, m]).only_enforce_if(literal)
            model.add(start[kinds[1], s, m] >= end[op]).only_enforce_if(literal)
            rows[rank[op]].append(op)
    streams: dict[int, list[Op]] = {}
    for (s, m), literal in away.items():
        if literal is None:
            continue
        if again[s, m] is not None:
            model.add_bool_or(literal.negated(), again[s, m].negated())
        out, home = ("O", s, m), ("L", s, m)
        for op in (out, home):
            long[op], rank[op], present[op], needs[op] = instance.time[op[0]][s], hosts[m][s], literal, []
            start[op], end[op] = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
            model.add(end[op] == start[op] + long[op])
            streams.setdefault(rank[op], []).append(op)
        for before, after in ((("F", s, m), out), (out, home), (home, (kinds[1], s, m))):
            model.add(start[after] >= end[before]).only_enforce_if(literal)
    for op in ops:
        for before, lag in needs[op]:
            model.add(start[op] >= end[before] + lag)
    if instance.free or instance.objective == "span":
        _in_order(model, instance, kinds, pipeline, start, end, whole)
    else:
        last: dict[int, int] = {}
        for m, p in enumerate(pipeline):
            if p in last:
                model.add(start["F", 0, m] >= start["F", 0, last[p]])
            last[p] = m
    for r, stream in streams.items():
        model.add_no_overlap(
            model.new_optional_interval_var(start[op], long[op], end[op], present[op], "") for op in stream
        )
        if instance.host[r] is not None:
            _host(model, instance, stream, start, end, present, instance.host[r], horizon)
    for r, row in rows.items():
        model.add_no_overlap(
            model.new_optional_interval_var(start[op], long[op], end[op], present[op], "")
            if op in present
            else model.new_interval_var(start[op], long[op], end[op], "")
            for op in row
        )
        cap = instance.cap[r]
        if cap is not None:
            cells = sorted({op[1:] for op in row})
            _hold(model, instance, cells, kinds, start, end, again, away, whole, cap, horizon)
    value = model.new_int_var(0, horizon, "")
    if instance.objective == "makespan":
        for op in start:
            added = model.add(value >= end[op])
            if op in present:
                added.only_enforce_if(present[op])
    else:
        for op in ops:
            _start_at_once(model, op, needs[op], rows[rank[op]], start, long)
        for row in rows.values():
            first = model.new_int_var(0, horizon, "")
            model.add_min_equality(first, [start[op] for op in row])
            for op in row:
                model.add(value >= end[op] - first)
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
    order = []
    for r in range(len(instance.cap)):
        there = [op for op in rows.get(r, []) if op not in present or solver.boolean_value(present[op])]
        there.sort(key=lambda op: solver.value(start[op]))
        order.append(
            [
                ("B", *op[1:]) if op[0] == "I" and whole[op[1:]] is not None and solver.value(whole[op[1:]]) else op
                for op in there
            ]
        )
    bound = round(solver.best_objective_bound)
    return Solved(round(solver.objective_value), bound, status == cp_model.OPTIMAL, order)


@dataclass(frozen=True)
class Task:
    """An op of any problem, in whole numbers.

    Attributes:
        ranks: all run it at once. time: at least 0.
        needs: (place of another task in the list, how much later than its end).
        takes, gives: of each of its ranks, at its start and back at its end.
    """

    ranks: tuple[int, ...]
    time: int
    needs: tuple[tuple[int, int], ...]
    takes: int = 0
    gives: int = 0


def solve_tasks(
    tasks: Sequence[Task], cap: Sequence[int | None], seconds: float = 60.0, num_workers: int = 1
) -> Solved:
    """The least makespan of tasks: those of a rank do not overlap, and none holds more than its cap.

    No order within a stage is assumed.
    """
    model: Any = cp_model.CpModel()
    horizon = sum(task.time + sum(lag for _, lag in task.needs) for task in tasks)
    start = [model.new_int_var(0, horizon, "") for _ in tasks]
    value = model.new_int_var(0, horizon, "")
    for at, task in zip(start, tasks, strict=True):
        model.add(value >= at + task.time)
        for before, lag in task.needs:
            model.add(at >= start[before] + tasks[before].time + lag)
    for rank, most in enumerate(cap):
        mine = [k for k, task in enumerate(tasks) if rank in task.ranks]
        model.add_no_overlap(model.new_fixed_size_interval_var(start[k], tasks[k].time, "") for k in mine)
        if most is not None and any(tasks[k].takes for k in mine):
            taking = [(start[k], tasks[k].takes) for k in mine if tasks[k].takes]
            giving = [(start[k] + tasks[k].time, -tasks[k].gives) for k in mine if tasks[k].gives]
            times, changes = zip(*taking, *giving, strict=True)
            model.add_reservoir_constraint(times, changes, min(0, -sum(tasks[k].gives for k in mine)), most)
    model.minimize(value)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(model.validate())
    if status == cp_model.INFEASIBLE:
        return Solved(None, horizon, True, None)
    bound = int(solver.best_objective_bound + 1e-6)
    if status == cp_model.UNKNOWN:
        return Solved(None, bound, False, None)
    return Solved(round(solver.objective_value), bound, status == cp_model.OPTIMAL, None)


def _best_deal(instance: Instance, seconds: float, num_workers: int) -> Solved:
    """The best of all ways to deal the microbatches to the pipelines, each solved by itself."""
    found = []
    for counts in product(range(instance.num_microbatches + 1), repeat=len(instance.pipelines)):
        if sum(counts) == instance.num_microbatches:
            found.append(solve(replace(instance, counts=counts, any_deal=False), seconds, num_workers))
    values = [each for each in found if each.value is not None]
    best = min(values, key=lambda each: each.value or 0) if values else None
    # A deal without any schedule refutes nothing of the others.
    bound = min(each.bound for each in found)
    proved = all(each.proved for each in found) or (best is not None and best.value == bound)
    return Solved(None if best is None else best.value, bound, proved, None if best is None else best.order)


def _in_order(
    model: Any,
    instance: Instance,
    kinds: list[str],
    pipeline: Sequence[int],
    start: Mapping[Op, Any],
    end: Mapping[Op, Any],
    whole: Mapping[tuple[int, int], Any],
) -> None:
    """Each stage of a pipeline runs F, R, I or B, and W or B in the order of microbatches."""
    last: dict[int, int] = {}
    for m, p in enumerate(pipeline):
        before = last.get(p)
        last[p] = m
        if before is None:
            continue
        for s in range(len(instance.memory)):
            for kind in (*kinds, "R", "O", "L"):
                # Where an R, O or L is not there its start is free, so that it may stand between its neighbours.
                if (kind, s, m) in start and not (kind == "W" and whole[s, m] is not None):
                    model.add(start[kind, s, m] >= start[kind, s, before])
            if kinds[-1] == "W" and whole[s, m] is not None:
                for now, of_now in (("W", whole[s, m].negated()), ("I", whole[s, m])):
                    for then, of_then in (("W", whole[s, before].negated()), ("I", whole[s, before])):
                        model.add(start[now, s, m] >= end[then, s, before]).only_enforce_if([of_now, of_then])


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
    cells: Sequence[tuple[int, int]],
    kinds: list[str],
    start: Mapping[Op, Any],
    end: Mapping[Op, Any],
    again: Mapping[tuple[int, int], Any],
    away: Mapping[tuple[int, int], Any],
    whole: Mapping[tuple[int, int], Any],
    cap: int,
    horizon: int,
) -> None:
    """What each microbatch holds on a stage, one phase after the other: `kept` from F to R, all of it from R (or F)
    to the end of the backward, and from the end of I to that of W what I does not free."""
    intervals, amounts = [], []

    def phase(begin: Any, until: Any, amount: int, when: Any = None) -> None:
        if amount > 0:
            length = model.new_int_var(0, horizon, "")
            if when is not None:
                intervals.append(model.new_optional_interval_var(begin, length, until, when, ""))
            else:
                intervals.append(model.new_interval_var(begin, length, until, ""))
            amounts.append(amount)

    for s, m in cells:
        memory, back = instance.memory[s], (kinds[1], s, m)
        redo, gone = again[s, m], away[s, m]
        if redo is None and gone is None:
            phase(start["F", s, m], end[back], memory)
        else:
            stays = model.new_bool_var("")
            forms = [stays, *(literal for literal in (redo, gone) if literal is not None)]
            model.add_exactly_one(forms)
            phase(start["F", s, m], end[back], memory, stays)
        if gone is not None:
            phase(start["F", s, m], end["O", s, m], memory, gone)
            phase(start["L", s, m], end[back], memory, gone)
        if redo is not None:
            phase(start["F", s, m], start["R", s, m], instance.kept[s], redo)
            phase(start["R", s, m], end[back], memory, redo)
        if "I" in kinds:
            one = whole[s, m]
            left = memory - instance.freed_by_input[s]
            phase(end[back], end["W", s, m], left, None if one is None else one.negated())
    model.add_cumulative(intervals, amounts, cap)


def _host(
    model: Any,
    instance: Instance,
    stream: Sequence[Op],
    start: Mapping[Op, Any],
    end: Mapping[Op, Any],
    present: Mapping[Op, Any],
    cap: int,
    horizon: int,
) -> None:
    """What lies in a rank's host memory, from the start of O to the end of L."""
    intervals, amounts = [], []
    for kind, s, m in stream:
        if kind == "O":
            length = model.new_int_var(0, horizon, "")
            literal = present[kind, s, m]
            intervals.append(model.new_optional_interval_var(start["O", s, m], length, end["L", s, m], literal, ""))
            amounts.append(instance.memory[s])
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
