"""What was recorded of a run: every op with its step, replica, rank, stage and microbatch, as columns.

    step  replica  rank  op                    stage  microbatch   start     end
      16        0     1  backward-compute          1           3   2301.2  2684.7
      16        0     1  forward-recv             -1          -1   2684.7  2688.4
      16        0     1  grads-reduce-scatter     -1          -1  46056.7 46270.8

All readers make this, and all of the analysis begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A numpy array."""
NONE = -1
"""What stands where an op has no stage, no microbatch."""


class TraceError(Exception):
    """A trace that cannot be read, or not be analysed; the message says what is missing and what would help."""

    exit_code = 1
    rule = "trace"


class Scope(Enum):
    """Who takes part in an op.

    COMPUTE: its rank alone, for a stage and a microbatch. LOCAL: its rank alone, besides the microbatches.
    SEND, RECEIVE: one end of a message between two ranks of a pipeline.
    REPLICAS: the same rank of all replicas. PIPELINE: those ranks of one pipeline that have it. ALL: all ranks.
    """

    COMPUTE = "compute"
    LOCAL = "local"
    SEND = "send"
    RECEIVE = "receive"
    REPLICAS = "replicas"
    PIPELINE = "pipeline"
    ALL = "all"

    @property
    def is_collective(self) -> bool:
        return self in (Scope.REPLICAS, Scope.PIPELINE, Scope.ALL)

    @property
    def is_message(self) -> bool:
        return self in (Scope.SEND, Scope.RECEIVE)


class TracedKind(NamedTuple):
    """A kind of op as its trace names it.

    Attributes:
        name: in the trace.
        scope: who takes part.
        kind: of compute, Penstock's letter: F, B, I, W, R. Of messages F for activations, B for gradients.
        is_communication: whether its time is that of a network, and compared by its median.
    """

    name: str
    scope: Scope
    kind: str = ""
    is_communication: bool = False


@dataclass(frozen=True, eq=False)
class RunTrace:
    """Ops of one run, one entry a column for each, in no particular order. Times are milliseconds.

    Attributes:
        name: of the trace, for people.
        kinds: what `kind` counts.
        kind, step, replica, rank, stage, microbatch: ints. `stage` counts over the whole model; of an op besides the
            microbatches it is the stage whose gradients or parameters it is about, where that is known.
        start, end: floats. Those of one step share a clock, or are aligned later.
        notes: what a reader did that a person should know.
    """

    name: str
    kinds: tuple[TracedKind, ...]
    kind: Array
    step: Array
    replica: Array
    rank: Array
    stage: Array
    microbatch: Array
    start: Array
    end: Array
    notes: tuple[str, ...] = ()

    COLUMNS = ("kind", "step", "replica", "rank", "stage", "microbatch", "start", "end")

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        return (
            f"<RunTrace {self.name}: {len(self)} ops, {len(self.steps)} steps, {self.num_replicas} replicas of "
            f"{self.num_ranks} ranks>"
        )

    @cached_property
    def steps(self) -> Array:
        return np.unique(self.step)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return int(self.rank.max()) + 1 if len(self) else 0

    @cached_property
    def num_replicas(self) -> int:
        return int(self.replica.max()) + 1 if len(self) else 0

    @cached_property
    def num_stages(self) -> int:
        return int(self.stage.max()) + 1 if len(self) else 0

    def has(self, test: Callable[[TracedKind], bool]) -> Array:
        """Whether each op's kind passes a test."""
        if not self.kinds:
            return np.zeros(len(self), bool)
        return np.array([test(kind) for kind in self.kinds])[self.kind]

    def take(self, chosen: Array) -> RunTrace:
        """Some of the ops."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in self.COLUMNS})

    def with_note(self, note: str) -> RunTrace:
        return replace(self, notes=(*self.notes, note))


class TracedOp(NamedTuple):
    """One op, as readers that go event by event collect them. `start` and `end` in milliseconds."""

    name: str
    step: int
    replica: int
    rank: int
    stage: int
    microbatch: int
    start: float
    end: float


MOST = 1 << 62
"""Above this a number in a file names nothing."""


def whole_numbers(what: str, values: Array) -> Array:
    """A column of floats as whole numbers; where there is none, `NONE`.

    Args:
        what: the column, for errors.

    Raises:
        TraceError: numbers that are not whole, or beyond what a file can mean.
    """
    filled = np.where(np.isnan(values), NONE, values)
    if (wrong := ~np.isfinite(filled) | (np.abs(filled) > MOST)).any():
        raise TraceError(f"{what} holds {filled[wrong][0]:g}: give whole numbers, counted from 0")
    if (filled != np.round(filled)).any():
        raise TraceError(f"{what} holds numbers that are not whole")
    return filled.astype(np.int64)


def trace_of(
    name: str, ops: Iterable[TracedOp], kind_of: Callable[[str], TracedKind], notes: Sequence[str] = ()
) -> RunTrace:
    """The columns of ops that were read one by one."""
    found = list(ops)
    columns = list(zip(*found, strict=True)) if found else [()] * len(TracedOp._fields)
    names, kind = np.unique(np.array(columns[0], dtype=object).astype(str), return_inverse=True)
    for what, column in zip(TracedOp._fields[1:6], columns[1:6], strict=True):
        if column and max(map(abs, column)) > MOST:
            raise TraceError(f"{name}: {what} {max(column, key=abs)} of an op: numbers count from 0")
    ints = [np.array(column, np.int64) for column in columns[1:6]]
    floats = [np.array(column, np.float64) for column in columns[6:]]
    kinds = tuple(kind_of(str(each)) for each in names)
    step, replica, rank, stage, microbatch = ints
    start, end = floats
    return RunTrace(
        name, kinds, kind.astype(np.int64), step, replica, rank, stage, microbatch, start, end, tuple(notes)
    )
