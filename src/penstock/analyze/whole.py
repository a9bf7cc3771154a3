"""Checks that a trace is whole: one job, every op of every step, and clocks that only go forwards.

What follows can then take for granted that all steps have the same ops, and lays them out as rows of one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.formats.traces.run_trace import NONE, Array, RunTrace, Scope, TraceError

OVERLAP = 0.05
"""How far two ops of one rank may overlap, as a share of the shorter: what the rounding of timestamps makes."""
SHOWN = 3
CLOCK_HELP = (
    "record with a clock that is not set while it runs (CLOCK_MONOTONIC), or leave these steps out with --steps"
)


class OpKey(NamedTuple):
    """One op of a step: where it runs, what it is, and which of several it is."""

    kind: int
    replica: int
    rank: int
    stage: int
    microbatch: int
    number: int


@dataclass(frozen=True, eq=False)
class StepTable:
    """The same ops in every step: K steps, M ops.

    Attributes:
        trace: what it was made from; its own columns are in another order.
        steps: their numbers, (K,).
        keys: of each op of a step, in the order of the columns.
        kind, replica, rank, stage, microbatch, number: the same as columns, (M,).
        start, end: ms from the step's first start, (K, M).
    """

    trace: RunTrace
    steps: Array
    keys: tuple[OpKey, ...]
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
        return len(self.keys)

    def is_scope(self, *scopes: Scope) -> Array:
        """Whether each op is of one of these scopes, (M,)."""
        return np.array([kind.scope in scopes for kind in self.trace.kinds])[self.kind]

    def letters(self) -> Array:
        """Penstock's letter of each op's kind; empty where it has none, (M,)."""
        return np.array([kind.kind for kind in self.trace.kinds])[self.kind]

    def named(self, op: int) -> str:
        """An op, for people."""
        return _named(self.trace, self.keys[op])


def whole_steps(trace: RunTrace, *, drop_incomplete: bool = False) -> StepTable:
    """The steps of a trace as one table.

    Args:
        drop_incomplete: leave out steps in which ops are missing, and note it, rather than refuse the trace.

    Raises:
        TraceError: no microbatches, times that go backwards, ops that occur twice or are missing.
    """
    _require_microbatches(trace)
    _require_counted(trace)
    _require_forwards(trace)
    order = np.lexsort(
        (trace.start, trace.microbatch, trace.stage, trace.rank, trace.replica, trace.kind, trace.step)
    )
    trace = trace.take(order)
    number = _numbers(trace)
    _require_one_job(trace, number)
    columns = np.stack([trace.kind, trace.replica, trace.rank, trace.stage, trace.microbatch, number], axis=1)
    keys, of_key = np.unique(columns, axis=0, return_inverse=True)
    of_key = of_key.reshape(-1)
    place = np.searchsorted(trace.steps, trace.step)
    there = np.zeros((len(trace.steps), len(keys)), bool)
    there[place, of_key] = True
    named = tuple(OpKey(*map(int, key)) for key in keys)
    _require_all_stages(trace, named)
    complete = there.all(axis=1)
    if not complete.all():
        trace, complete = _incomplete(trace, named, there, drop_incomplete)
    start, end = (np.full(there.shape, np.nan) for _ in range(2))
    start[place, of_key], end[place, of_key] = trace.start, trace.end
    start, end = start[complete], end[complete]
    first = start.min(axis=1, keepdims=True)
    kind, replica, rank, stage, microbatch, number = keys.T
    start, end, numbers = start - first, end - first, trace.steps[complete]
    return StepTable(trace, numbers, named, kind, replica, rank, stage, microbatch, number, start, end)


MOST = 1 << 20
"""Replicas, ranks, stages and microbatches of a step that a trace can have, each."""


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


def _require_forwards(trace: RunTrace) -> None:
    """Raises TraceError where time goes backwards: within an op, or between two of one rank."""
    known = np.isfinite(trace.start) & np.isfinite(trace.end)
    if not known.all():
        raise TraceError(f"{trace.name}: {int((~known).sum())} ops have no start or no end; leave their rows out")
    back = trace.end < trace.start
    if back.any():
        at = int(np.flatnonzero(back)[0])
        raise TraceError(
            f"{trace.name}: the clock goes backwards: {_spot(trace, at)} ends "
            f"{trace.start[at] - trace.end[at]:.6g} ms before it starts ({int(back.sum())} such ops); "
            f"{CLOCK_HELP}"
        )
    compute = np.flatnonzero(trace.has(lambda kind: kind.scope is Scope.COMPUTE))
    if not (trace.end[compute] > trace.start[compute]).any():
        raise TraceError(
            f"{trace.name}: no forward or backward takes any time; are the times of another unit, or rounded to it? "
            "Give --unit, or record with a finer clock"
        )
    order = compute[
        np.lexsort([getattr(trace, name)[compute] for name in ("end", "start", "rank", "replica", "step")])
    ]
    before, after = order[:-1], order[1:]
    same = np.ones(len(before), bool)
    for name in ("step", "replica", "rank"):
        column = getattr(trace, name)
        same &= column[before] == column[after]
    shorter = np.minimum(trace.end[before] - trace.start[before], trace.end[after] - trace.start[after])
    over = trace.end[before] - trace.start[after]
    wrong = np.flatnonzero(same & (over > OVERLAP * shorter) & (over > 1e-3))
    if len(wrong) and not _occurs_twice(trace):
        a, b = int(before[wrong[0]]), int(after[wrong[0]])
        raise TraceError(
            f"{trace.name}: the clock goes backwards, or ops overlap: {_spot(trace, b)} starts "
            f"{over[wrong[0]]:.6g} ms before {_spot(trace, a, short=True)} has ended on the same rank "
            f"({len(wrong)} such pairs); {CLOCK_HELP}"
        )


def _occurs_twice(trace: RunTrace) -> bool:
    """Whether an op of a microbatch occurs twice, which is then what is wrong."""
    compute = np.flatnonzero(trace.has(lambda kind: kind.scope is Scope.COMPUTE))
    names = ("step", "replica", "rank", "kind", "stage", "microbatch")
    columns = np.stack([getattr(trace, name)[compute] for name in names], axis=1)
    return len(np.unique(columns, axis=0)) < len(columns)


def _numbers(trace: RunTrace) -> Array:
    """Which of its kind each op is in its step, of a trace in the order of `whole_steps`."""
    names = ("step", "kind", "replica", "rank", "stage", "microbatch")
    new = np.zeros(len(trace), bool)
    new[0] = True
    for name in names:
        column = getattr(trace, name)
        new[1:] |= column[1:] != column[:-1]
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


def _require_all_stages(trace: RunTrace, keys: tuple[OpKey, ...]) -> None:
    """Raises TraceError where a microbatch misses a stage in all steps."""
    found: dict[int, dict[tuple[str, int], set[int]]] = {}
    for key in keys:
        if trace.kinds[key.kind].scope is Scope.COMPUTE:
            ops = found.setdefault(key.replica, {})
            ops.setdefault((trace.kinds[key.kind].kind, key.stage), set()).add(key.microbatch)
    every = sorted({stage for ops in found.values() for _, stage in ops})
    if every != list(range(len(every))):
        absent = next(stage for stage in range(len(every) + 1) if stage not in every)
        raise TraceError(
            f"{trace.name} has no ops of stage {absent}, but of stage {every[-1]}: is the file of one rank missing? "
            "Give the traces of all ranks, or the folder that holds them"
        )
    for replica, ops in sorted(found.items()):
        microbatches = set().union(*ops.values())
        for stage in every:
            for letters in (("F",), ("B", "I")):
                ran = set().union(*(ops.get((letter, stage), set()) for letter in letters))
                if lacks := sorted(microbatches - ran):
                    what = "forward" if letters == ("F",) else "backward"
                    raise TraceError(
                        f"{trace.name}: replica {replica} has no {what} of stage {stage} for microbatch "
                        f"{', '.join(map(str, lacks[:SHOWN]))}{' and others' if len(lacks) > SHOWN else ''} in any "
                        "step: was recording started or stopped in the middle of a step? Record whole steps, or give "
                        "those that are with --steps"
                    )


def _incomplete(
    trace: RunTrace, keys: tuple[OpKey, ...], there: Array, drop_incomplete: bool
) -> tuple[RunTrace, Array]:
    """Refuses, or notes, steps in which ops are missing."""
    complete = there.all(axis=1)
    lacking = np.flatnonzero(~complete).tolist()
    numbers = ", ".join(str(int(trace.steps[at])) for at in lacking[:8]) + (" ..." if len(lacking) > 8 else "")
    worst = lacking[0]
    missing = [_named(trace, keys[at]) for at in np.flatnonzero(~there[worst]).tolist()]
    said = (
        f"step {int(trace.steps[worst])} has {len(keys) - len(missing)} of {len(keys)} ops; missing are "
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
    return trace.with_note(f"{len(lacking)} steps in which ops are missing were left out: {numbers}"), complete


def _named(trace: RunTrace, key: OpKey) -> str:
    kind = trace.kinds[key.kind]
    where = f"replica {key.replica}, rank {key.rank}"
    if kind.scope is Scope.COMPUTE:
        return f"{kind.name} of microbatch {key.microbatch}, stage {key.stage} ({where})"
    return f"{kind.name}{f' number {key.number}' if key.number else ''} ({where})"


def _spot(trace: RunTrace, at: int, short: bool = False) -> str:
    kind, replica, rank, stage, microbatch = (int(getattr(trace, name)[at]) for name in OpKey._fields[:-1])
    key = OpKey(kind, replica, rank, stage, microbatch, 0)
    return _named(trace, key) if short else f"step {int(trace.step[at])}, {_named(trace, key)}"
