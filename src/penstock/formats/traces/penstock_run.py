"""Penstock's own records: `timelines.jsonl` of a run's folder, one line an iteration with every op's times."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.formats.traces.op_names import kind_named
from penstock.formats.traces.run_trace import NONE, RunTrace, Scope, TracedOp, TraceError, trace_of

TIMELINES = "timelines.jsonl"
"""What a run with `--adapt` records; of iterations before and after each change."""
TIMELINE = "timeline.json"
"""What other runs leave: the trace of one step, measured and simulated."""


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
            record = json.loads(line)
            iteration = int(record["iteration"])
            configurations.add(int(record["number"]))
            ops = [(int(r), str(k), int(s), int(m), float(a), float(b)) for r, k, s, m, a, b in record["ops"]]
        except (ValueError, KeyError, TypeError, OverflowError):
            if number == len(lines) and number > 1:  # cut off where the run was
                break
            raise TraceError(f"{path.name}, line {number}, is no record of an iteration: {line[:60]!r}") from None
        for rank, op, stage, microbatch, start, end in ops:
            compute = kind_named(op).scope is Scope.COMPUTE
            rows.append(TracedOp(op, iteration, 0, rank, stage, microbatch if compute else NONE, start, end))
    notes = []
    if len(configurations) > 1:
        notes.append(
            f"the run changed its plan {len(configurations) - 1} times: choose iterations of one with --steps"
        )
    return trace_of(name, rows, kind_named, notes)
