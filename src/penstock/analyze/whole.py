"""Checks that a trace is whole: one job, every op of every step, and clocks that only go forwards.

What follows can then take for granted that all steps have the same ops, and lays them out as rows of one table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.formats.traces.run_trace import NONE, Array, RunTrace, Scope, TraceError

OVERLAP = 0.05
"""How far two ops of one rank may overlap, as a share of the shorter: what the rounding of timestamps makes."""
SHOWN = 3
CLOCK_HELP = (
    "record with a clock that is not set while it runs (CLOCK_MONOTONIC), or leave these steps out with --steps"
)
MOST = 1 << 20
"""Replicas, ranks, stages and microbatches of a step that a trace can have, each."""


@dataclass(frozen=True, eq=False)
class StepTable:
    """The same ops in every step: K steps, M ops.

    Attributes:
        trace: what it was made from; its own columns are in another order.
        steps: their numbers, (K,).
        kind, replica, rank, stage, microbatch: of each op of a step, (M,).
        number: which of several alike it is, (M,).
        start, end: ms from the step's first start, (K, M).
    """

    trace: RunTrace
    steps: Array
    kind: Array
    replica: Array
    rank: Array
    stage: Array
    microbatch: Array
    number: Array
    start: Array
    end: Array

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    @property
    def num_workers(self) -> int:
        return self.trace.num_replicas * self.trace.num_ranks

    @cached_property
    def worker(self) -> Array:
        """The rank of each op, counted over all replicas, (M,)."""
        return self.replica * self.trace.num_ranks + self.rank

    @cached_property
    def letters(self) -> Array:
        """Penstock's letter of each op's kind; empty where it has none, (M,)."""
        return np.array([kind.kind for kind in self.trace.kinds])[self.kind]

    @cached_property
    def compute(self) -> Array:
        """Which ops are of a microbatch."""
        return np.flatnonzero(self.is_scope(Scope.COMPUTE))

    @cached_property
    def groups(self) -> Array:
        """The collective, or op of ranks that share its stage, that each op is a member of, (M,).

        NONE where it is none, or its only member.
        """
        found = np.full(self.num_ops, NONE)
        joined: dict[tuple[int, ...], list[int]] = {}
        for op in np.flatnonzero(self.is_scope(Scope.REPLICAS, Scope.PIPELINE, Scope.ALL, Scope.COMPUTE)).tolist():
            replica, rank, stage, microbatch = (
                int(column[op]) for column in (self.replica, self.rank, self.stage, self.microbatch)
            )
            where = {
                Scope.REPLICAS: (0, rank, stage),
                Scope.PIPELINE: (1, replica, 0),
                Scope.COMPUTE: (3, replica, stage, microbatch),
            }.get(self.trace.kinds[self.kind[op]].scope, (2, 0, 0))
            joined.setdefault((*where, int(self.kind[op]), int(self.number[op])), []).append(op)
        for group, members in enumerate(joined.values()):
            if len(members) > 1:
                found[members] = group
        return found

    def is_scope(self, *scopes: Scope) -> Array:
        """Whether each op is of one of these scopes, (M,)."""
        return np.array([kind.scope in scopes for kind in self.trace.kinds])[self.kind]

    def named(self, op: int) -> str:
        """An op, for people."""
        return _named(self, self.trace, op, int(self.number[op]))


def whole_steps(trace: RunTrace, *, drop_incomplete: bool = False) -> StepTable:
    """The steps of a trace as one table.

    Args:
        drop_incomplete: leave out steps in which ops are missing, and note it, rather than refuse the trace.

    Raises:
        TraceError: no microbatches, times that go backwards, ops that occur twice or are missing.
    """
    _require_microbatches(trace)
    _require_counted(trace)
    _require_times(trace)
    order = np.lexsort(
        (trace.start, trace.microbatch, trace.stage, trace.rank, trace.replica, trace.kind, trace.step)
    )
    trace = trace.take(order)
    number = _numbers(trace)
    _require_one_job(trace, number)
    _require_one_after_the_other(trace)
    columns = np.stack([trace.kind, trace.replica, trace.rank, trace.stage, trace.microbatch, number], axis=1)
    keys, of_key = np.unique(columns, axis=0, return_inverse=True)
    place = np.searchsorted(trace.steps, trace.step), of_key.reshape(-1)
    start, end = (np.full((len(trace.steps), len(keys)), np.nan) for _ in range(2))
    start[place], end[place] = trace.start, trace.end
    first = np.nanmin(start, axis=1, keepdims=True)
    kind, replica, rank, stage, microbatch, number = keys.T
    start, end = start - first, end - first
    table = StepTable(trace, trace.steps, kind, replica, rank, stage, microbatch, number, start, end)
    _require_all_stages(table)
    return _without_incomplete(table, drop_incomplete)


def _require_counted(trace: RunTrace) -> None:
    """Numbers that count places count from 0: a table has a row for each."""
    compute = trace.has(lambda kind: kind.scope is Scope.COMPUTE)
    for name in ("replica", "rank", "stage", "microbatch"):
        largest = int(getattr(trace, name)[compute].max())
        if largest >= MOST:
            raise TraceError(
                f"{trace.name} has an op of {name} {largest}: numbers of a {name} count from 0, anew in each step; "
                "number them so, or give another column by --column"
            )


def _require_microbatches(trace: RunTrace) -> None:
    names = sorted({kind.name for kind in trace.kinds})
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    help_ = (
        "a pipeline's forwards and backwards with their microbatches are needed: name them, like forward-compute, or "
        "say by --pattern what names mean, or wrap each in torch.profiler.record_function(f'PP:{stage}F{microbatch}')"
    )
    if not len(trace):
        raise TraceError(f"{trace.name} has no ops; {help_}")
    compute = trace.has(lambda kind: kind.scope is Scope.COMPUTE)
    if not compute.any():
        raise TraceError(f"{trace.name} has no forwards or backwards; its ops are {shown}; {help_}")
    without = compute & (trace.microbatch == NONE)
    if without.any():
        which = sorted({trace.kinds[kind].name for kind in np.unique(trace.kind[without]).tolist()})
        raise TraceError(
            f"{trace.name} does not say which microbatch {int(without.sum())} of {int(compute.sum())} ops are of "
            f"({', '.join(which)}); {help_}"
        )
    if (compute & (trace.stage == NONE)).any():
        raise TraceError(
            f"{trace.name} does not say of which stage its forwards and backwards are; give a pattern with a group "
            "named stage, or a column of that name"
        )
    letters = {trace.kinds[kind].kind for kind in np.unique(trace.kind[compute]).tolist()}
    if "F" not in letters or not letters & {"B", "I"}:
        lacks = "forwards" if "F" not in letters else "backwards"
        raise TraceError(f"{trace.name} has no {lacks}; its ops are {shown}; {help_}")


def _require_times(trace: RunTrace) -> None:
    """Raises TraceError where an op has no time, takes less than none, or all forwards and backwards take none."""
    known = np.isfinite(trace.start) & np.isfinite(trace.end)
    if not known.all():
        raise TraceError(f"{trace.name}: {int((~known).sum())} ops have no start or no end; leave their rows out")
    taken = trace.end - trace.start
    if (taken < 0).any():
        at = int(np.argmax(taken < 0))
        raise TraceError(
            f"{trace.name}: the clock goes backwards: {_spot(trace, at)} ends {-taken[at]:.6g} ms before it starts "
            f"({int((taken < 0).sum())} such ops); {CLOCK_HELP}"
        )
    if not taken[trace.has(lambda kind: kind.scope is Scope.COMPUTE)].any():
        raise TraceError(
            f"{trace.name}: no forward or backward takes any time; are the times of another unit, or rounded to it? "
            "Give --unit, or record with a finer clock"
        )


def _require_one_after_the_other(trace: RunTrace) -> None:
    """Raises TraceError where an op of a microbatch starts before the one before it on its rank has ended."""
    compute = np.flatnonzero(trace.has(lambda kind: kind.scope is Scope.COMPUTE))
    names = ("end", "start", "rank", "replica", "step")
    order = compute[np.lexsort([getattr(trace, name)[compute] for name in names])]
    before, after = order[:-1], order[1:]
    worker = np.stack([trace.step, trace.replica, trace.rank])
    same = (worker[:, before] == worker[:, after]).all(axis=0)
    shorter = np.minimum(trace.end[before] - trace.start[before], trace.end[after] - trace.start[after])
    over = trace.end[before] - trace.start[after]
    wrong = np.flatnonzero(same & (over > OVERLAP * shorter) & (over > 1e-3))
    if len(wrong):
        a, b = int(before[wrong[0]]), int(after[wrong[0]])
        raise TraceError(
            f"{trace.name}: the clock goes backwards, or ops overlap: {_spot(trace, b)} starts "
            f"{over[wrong[0]]:.6g} ms before {_named(trace, trace, a)} has ended on the same rank "
            f"({len(wrong)} such pairs); {CLOCK_HELP}"
        )


def _numbers(trace: RunTrace) -> Array:
    """Which of its kind each op is in its step, of a trace in the order of `whole_steps`."""
    names = ("step", "kind", "replica", "rank", "stage", "microbatch")
    columns = np.stack([getattr(trace, name) for name in names])
    new = np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))
    place = np.arange(len(trace))
    return place - np.maximum.accumulate(np.where(new, place, 0))


def _require_one_job(trace: RunTrace, number: Array) -> None:
    twice = trace.has(lambda kind: kind.scope is Scope.COMPUTE) & (number > 0)
    if twice.any():
        at = int(np.flatnonzero(twice)[0])
        raise TraceError(
            f"{trace.name}: {_spot(trace, at)} occurs twice, {trace.start[at] - trace.start[at - 1]:.6g} ms apart "
            f"({int(twice.sum())} such ops): are there two jobs, or two attempts of one, in this file? Give the rows "
            "of one, or tell them apart by replica"
        )


def _require_all_stages(table: StepTable) -> None:
    """Raises TraceError where a microbatch misses a stage in all steps."""
    name, compute = table.trace.name, table.compute
    every = np.unique(table.stage[compute]).tolist()
    if every != list(range(len(every))):
        absent = next(stage for stage in range(len(every) + 1) if stage not in every)
        raise TraceError(
            f"{name} has no ops of stage {absent}, but of stage {every[-1]}: is the file of one rank missing? "
            "Give the traces of all ranks, or the folder that holds them"
        )
    for replica in np.unique(table.replica[compute]).tolist():
        here = compute[table.replica[compute] == replica]
        for stage in every:
            for noun, letters in (("forward", ("F",)), ("backward", ("B", "I"))):
                ran = here[(table.stage[here] == stage) & np.isin(table.letters[here], letters)]
                if len(lacks := np.setdiff1d(table.microbatch[here], table.microbatch[ran])):
                    raise TraceError(
                        f"{name}: replica {replica} has no {noun} of stage {stage} for microbatch "
                        f"{', '.join(map(str, lacks[:SHOWN]))}{' and others' if len(lacks) > SHOWN else ''} in any "
                        "step: was recording started or stopped in the middle of a step? Record whole steps, or give "
                        "those that are with --steps"
                    )


def _without_incomplete(table: StepTable, drop_incomplete: bool) -> StepTable:
    """Refuses steps in which ops are missing, or leaves them out and notes it."""
    trace, there = table.trace, ~np.isnan(table.start)
    complete = there.all(axis=1)
    if complete.all():
        return table
    lacking = np.flatnonzero(~complete).tolist()
    numbers = ", ".join(str(int(table.steps[at])) for at in lacking[:8]) + (" ..." if len(lacking) > 8 else "")
    missing = [table.named(op) for op in np.flatnonzero(~there[lacking[0]]).tolist()]
    said = (
        f"step {int(table.steps[lacking[0]])} has {table.num_ops - len(missing)} of {table.num_ops} ops; missing are "
        f"{'; '.join(missing[:SHOWN])}{f' and {len(missing) - SHOWN} more' if len(missing) > SHOWN else ''}"
    )
    if not complete.any():
        raise TraceError(
            f"{trace.name}: no step has all ops that others have: {said}. Record whole steps; where steps differ in "
            "their microbatches, choose those with the same ops by --steps"
        )
    if not drop_incomplete:
        raise TraceError(
            f"{trace.name}: ops are missing in {len(lacking)} of {len(there)} steps ({numbers}): {said}. Record them "
            "again, or leave these steps out with --drop-incomplete"
        )
    noted = trace.with_note(f"{len(lacking)} steps in which ops are missing were left out: {numbers}")
    times = {name: getattr(table, name)[complete] for name in ("steps", "start", "end")}
    return replace(table, trace=noted, **times)


def _named(of: RunTrace | StepTable, trace: RunTrace, at: int, number: int = 0) -> str:
    kind = trace.kinds[of.kind[at]]
    where = f"replica {of.replica[at]}, rank {of.rank[at]}"
    if kind.scope is Scope.COMPUTE:
        return f"{kind.name} of microbatch {of.microbatch[at]}, stage {of.stage[at]} ({where})"
    return f"{kind.name}{f' number {number}' if number else ''} ({where})"


def _spot(trace: RunTrace, at: int) -> str:
    return f"step {int(trace.step[at])}, {_named(trace, trace, at)}"
