"""Penstock's own records: `timelines.jsonl` of a run's folder, one line an iteration with every op's times."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.formats.traces.op_names import kind_named
from penstock.formats.traces.run_trace import NONE, RunTrace, Scope, TracedOp, TraceError, trace_of

TIMELINES = "timelines.jsonl"
"""What a run with `--adapt` records; of iterations before and after each change."""
TIMELINE = "timeline.json"
"""What other runs leave: the trace of one step, measured and simulated."""


class TimelineRecord(msgspec.Struct):
    """A line of timelines.jsonl: an iteration, and the decision in force.

    Attributes:
        ops: of each its rank, kind, stage, microbatch, start and end (ms).
        why: what the iteration is recorded for.
    """

    iteration: int
    number: int
    ops: list[tuple[int, str, int, int, float, float]]
    why: str = ""


def read_penstock(path: Path, *, name: str) -> RunTrace:
    """Reads the timelines of a run.

    Raises:
        TraceError: a line that is no record of an iteration.
    """
    rows, configurations = [], set()
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise TraceError(f"{path.name} is no text") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = msgspec.json.decode(line, type=TimelineRecord)
        except msgspec.DecodeError:
            if number == len(lines) and number > 1:  # cut off where the run was
                break
            raise TraceError(f"{path.name}, line {number}, is no record of an iteration: {line[:60]!r}") from None
        configurations.add(record.number)
        for rank, op, stage, microbatch, start, end in record.ops:
            number_of = microbatch if kind_named(op).scope is Scope.COMPUTE else NONE
            rows.append(TracedOp(op, record.iteration, 0, rank, stage, number_of, start, end))
    notes = []
    if len(configurations) > 1:
        notes.append(
            f"the run changed its plan {len(configurations) - 1} times: choose iterations of one with --steps"
        )
    return trace_of(name, rows, kind_named, notes)
