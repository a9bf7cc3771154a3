"""Traces in the format of ByteDance's straggler study (OSDI 2025): a parquet table, one row an op.

    dp_rank  stage  rank  step  optype  start_ts  duration  seq_id  mc  mb_id  gmc

`stage` is the rank within its pipeline, `mc` a rank's model chunk and `gmc` the stage as we count it; times are
seconds. https://github.com/ByteDance-Seed/StragglerAnalysis has three traces and describes the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.formats.traces.op_names import kind_named
from penstock.formats.traces.run_trace import NONE, Array, RunTrace, Scope, TraceError, whole_numbers

NEEDED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "gmc", "mb_id")
JOBS = ("job", "job_id", "trial", "trial_name", "run_id")
"""Columns that would tell jobs apart."""


def read_study(path: Path) -> RunTrace:
    """Reads a parquet file.

    Raises:
        TraceError: pyarrow is not installed, the file is no parquet, columns are missing, or it holds several jobs.
    """
    columns = parquet_columns(path)
    if missing := [name for name in NEEDED if name not in columns]:
        raise TraceError(
            f"{path.name} has no column {', '.join(missing)}: the study's format has {', '.join(NEEDED)}; for a "
            "table with other names give them with --column, like --column microbatch=mb"
        )
    require_one_job(path, columns)
    names, kind = np.unique(columns["optype"].astype(str), return_inverse=True)
    kinds = tuple(kind_named(str(name)) for name in names)
    ints = {name: _whole(path, name, columns[name]) for name in ("dp_rank", "stage", "step", "gmc", "mb_id")}
    rank, stage = ints["stage"], ints["gmc"].copy()
    is_compute = np.array([each.scope is Scope.COMPUTE for each in kinds], bool)[kind] if len(kind) else kind > 0
    if "mc" in columns and is_compute.any():  # what reduces or gathers a chunk says which stage that is
        chunk = _whole(path, "mc", columns["mc"])
        is_chunk = (stage == NONE) & (chunk != NONE)
        stage[is_chunk] = chunk[is_chunk] * (int(rank[is_compute].max()) + 1) + rank[is_chunk]
    microbatch = np.where(is_compute, ints["mb_id"], NONE)
    start, duration = (_seconds(path, each, columns[each]) * 1e3 for each in ("start_ts", "duration"))
    end = start + duration
    return RunTrace(
        path.stem, kinds, kind.astype(np.int64), ints["step"], ints["dp_rank"], rank, stage, microbatch, start, end
    )


def require_one_job(path: Path, columns: Mapping[str, Array]) -> None:
    """Raises TraceError for a table whose rows are of several jobs."""
    for name in JOBS:
        if name in columns and len(jobs := np.unique(columns[name].astype(str))) > 1:
            raise TraceError(
                f"{path.name} holds {len(jobs)} jobs by its column {name} ({', '.join(jobs[:3])}): an analysis is of "
                f"one; write the rows of each {name} to a file of its own"
            )


def parquet_columns(path: Path) -> dict[str, Array]:
    """A parquet file's columns by name.

    Raises:
        TraceError: pyarrow is not installed, or this is no parquet file.
    """
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


def _seconds(path: Path, name: str, values: Array) -> Array:
    """A column of times."""
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        raise TraceError(f"{path.name}: column {name} holds {values[0]!r}: give seconds, as numbers") from None


def _whole(path: Path, name: str, values: Array) -> Array:
    """A column of whole numbers; a missing one is NONE."""
    if values.dtype == object or values.dtype.kind == "f":
        try:
            values = values.astype(np.float64)
        except (TypeError, ValueError):
            raise TraceError(f"{path.name}: column {name} holds {values[0]!r}: give whole numbers") from None
        return whole_numbers(f"{path.name}: column {name}", values)
    return values.astype(np.int64)
