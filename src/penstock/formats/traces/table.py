"""Tables with named columns, CSV or parquet: one row an op.

    op,stage,microbatch,rank,step,start,end
    F,0,0,0,0,0.0,10.2

Names that differ are given: {"microbatch": "mb", "op": "phase"}. Needed are op, stage, microbatch, start, and end or
duration; rank is the stage, replica and step are 0 where there is no column.

A parquet file has the columns of ByteDance's straggler study (OSDI 2025) where nothing else is said:

    dp_rank  stage  rank  step  optype  start_ts  duration  seq_id  mc  mb_id  gmc

`stage` is the rank within its pipeline, `mc` a rank's model chunk and `gmc` the stage as we count it; times are
seconds. https://github.com/ByteDance-Seed/StragglerAnalysis has three traces and describes the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.formats.traces.op_names import kind_named
from penstock.formats.traces.run_trace import NONE, Array, RunTrace, Scope, TraceError, whole_numbers

COLUMNS = ("op", "stage", "microbatch", "rank", "replica", "step", "start", "end", "duration")
STUDY = {
    "op": "optype", "stage": "gmc", "microbatch": "mb_id", "rank": "stage", "replica": "dp_rank", "step": "step",
    "start": "start_ts", "duration": "duration",
}  # fmt: skip
"""The study's names of our columns."""
JOBS = ("job", "job_id", "trial", "trial_name", "run_id")
"""Columns that would tell jobs apart."""
UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


def read_table(path: Path, columns: Mapping[str, str] | None = None, unit: str = "ms") -> RunTrace:
    """Reads a table.

    Args:
        columns: the table's name for each of `COLUMNS` that it calls otherwise.
        unit: of times; a study's are seconds.

    Raises:
        TraceError: a column is missing, a cell is no number, it holds several jobs, or it can't be read.
    """
    given = dict(columns or {})
    if unknown := sorted(given.keys() - set(COLUMNS)):
        raise TraceError(f"column {unknown[0]!r}: a trace has {', '.join(COLUMNS)}")
    if unit not in UNITS:
        raise TraceError(f"unit {unit!r}: give {', '.join(UNITS)}")
    read = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    is_study = path.suffix == ".parquet" and not given and "op" not in read
    if is_study:
        given, unit = STUDY, "s"
    for ours, theirs in given.items():
        if theirs not in read:
            help_ = "; for a table with other names give them with --column, like --column microbatch=mb" * is_study
            raise TraceError(f"{path.name} has no column {theirs!r} for {ours}; it has {', '.join(read)}{help_}")
    _require_one_job(path, read)
    found = {name: read[given.get(name, name)] for name in COLUMNS if given.get(name, name) in read}
    needed = [name for name in ("op", "stage", "microbatch", "start") if name not in found]
    if "end" not in found and "duration" not in found:
        needed.append("end (or duration)")
    if needed:
        raise TraceError(
            f"{path.name} has no column {', '.join(needed)}; it has {', '.join(read)}. Say which is which with "
            f"--column, like --column {needed[0].split()[0]}=NAME"
        )
    names, kind = np.unique(found["op"].astype(str), return_inverse=True)
    kinds = tuple(kind_named(str(name)) for name in names)
    ints = {name: _numbers(path, given.get(name, name), found[name]) for name in COLUMNS[1:6] if name in found}
    stage, rank = ints["stage"], ints.get("rank", ints["stage"])
    if (rank < 0).any():
        raise TraceError(f"{path.name}: {int((rank < 0).sum())} rows say no rank; give a column rank")
    compute = np.array([each.scope is Scope.COMPUTE for each in kinds], bool)[kind] if len(kind) else kind > 0
    if is_study and "mc" in read and compute.any():  # what reduces or gathers a chunk says which stage that is
        chunk = _numbers(path, "mc", read["mc"])
        stage = np.where((stage == NONE) & (chunk != NONE), chunk * (int(rank[compute].max()) + 1) + rank, stage)
    times = {
        name: _numbers(path, given.get(name, name), found[name], whole=False) * UNITS[unit]
        for name in COLUMNS[6:]
        if name in found
    }
    start = times["start"]
    end = times["end"] if "end" in times else start + times["duration"]
    zero = np.zeros(len(kind), np.int64)
    return RunTrace(
        path.stem, kinds, kind.astype(np.int64), ints.get("step", zero), ints.get("replica", zero), rank, stage,
        np.where(compute, ints["microbatch"], NONE), start, end,
    )  # fmt: skip


def _require_one_job(path: Path, columns: Mapping[str, Array]) -> None:
    for name in JOBS:
        if name in columns and len(jobs := np.unique(columns[name].astype(str))) > 1:
            raise TraceError(
                f"{path.name} holds {len(jobs)} jobs by its column {name} ({', '.join(jobs[:3])}): an analysis is of "
                f"one; write the rows of each {name} to a file of its own"
            )


def _parquet(path: Path) -> dict[str, Array]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError(
            f"{path.name} is parquet, which needs pyarrow: pip install 'penstock[traces]', or convert it to CSV"
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise TraceError(f"{path.name} is no parquet file that can be read: {str(error).splitlines()[0]}") from None
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def _csv(path: Path) -> dict[str, Array]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except UnicodeDecodeError:
        raise TraceError(f"{path.name} is no text") from None
    except csv.Error as error:
        raise TraceError(f"{path.name} is no table: {error}; is a quote left open?") from None
    if not rows:
        raise TraceError(f"{path.name} is empty; its first line names the columns: {','.join(COLUMNS)}")
    head, body = [name.strip() for name in rows[0]], [row for row in rows[1:] if row]
    if twice := [name for name in head if head.count(name) > 1]:
        raise TraceError(
            f"{path.name} has {head.count(twice[0])} columns named {twice[0]!r}; call one of them otherwise"
        )
    for number, row in enumerate(body, start=2):
        if len(row) != len(head):
            raise TraceError(f"{path.name}, row {number} has {len(row)} cells, the first row {len(head)}")
    return {name: np.array([row[place].strip() for row in body], object) for place, name in enumerate(head)}


def _numbers(path: Path, name: str, values: Array, whole: bool = True) -> Array:
    """A column of numbers; an empty cell is NONE, or NaN where it is a time."""
    if values.dtype == object:
        found = np.full(len(values), np.nan)
        for at, value in enumerate(values.tolist()):
            try:
                found[at] = np.nan if value is None or value == "" else float(value)
            except (TypeError, ValueError):
                raise TraceError(f"{path.name}, row {at + 2}: {name} is {value!r}: give a number") from None
        values = found
    try:
        values = values.astype(np.float64) if not whole or values.dtype.kind not in "iu" else values
    except (TypeError, ValueError):
        raise TraceError(f"{path.name}: column {name} holds {values[0]!r}: give numbers") from None
    return values if not whole else whole_numbers(f"{path.name}: column {name}", values)
