"""Tables with named columns, CSV or parquet: one row an op.

    op,stage,microbatch,rank,step,start,end
    F,0,0,0,0,0.0,10.2

Names that differ are given: {"microbatch": "mb", "op": "phase"}. Needed are op, stage, microbatch, start, and end or
duration; rank is the stage, replica and step are 0 where there is no column.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.formats.traces.op_names import kind_named
from penstock.formats.traces.run_trace import NONE, Array, RunTrace, Scope, TraceError, whole_numbers
from penstock.formats.traces.study import parquet_columns, require_one_job

COLUMNS = ("op", "stage", "microbatch", "rank", "replica", "step", "start", "end", "duration")
UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


def read_table(path: Path, columns: Mapping[str, str] | None = None, unit: str = "ms") -> RunTrace:
    """Reads a table.

    Args:
        columns: the table's name for each of `COLUMNS` that it calls otherwise.
        unit: of times.

    Raises:
        TraceError: a column is missing, or a cell is no number.
    """
    given = dict(columns or {})
    if unknown := sorted(given.keys() - set(COLUMNS)):
        raise TraceError(f"column {unknown[0]!r}: a trace has {', '.join(COLUMNS)}")
    if unit not in UNITS:
        raise TraceError(f"unit {unit!r}: give {', '.join(UNITS)}")
    read = parquet_columns(path) if path.suffix == ".parquet" else _csv(path)
    for ours, theirs in given.items():
        if theirs not in read:
            raise TraceError(f"{path.name} has no column {theirs!r} for {ours}; it has {', '.join(read)}")
    require_one_job(path, read)
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
    size = len(kind)
    ints = {name: _numbers(path, name, found[name]) for name in COLUMNS[1:6] if name in found}
    stage = ints["stage"]
    compute = np.array([each.scope is Scope.COMPUTE for each in kinds], bool)[kind] if size else kind > 0
    rank = ints.get("rank", stage)
    if (rank < 0).any():
        raise TraceError(f"{path.name}: {int((rank < 0).sum())} rows say no rank; give a column rank")
    scale = UNITS[unit]
    start = _numbers(path, "start", found["start"], whole=False) * scale
    if "end" in found:
        end = _numbers(path, "end", found["end"], whole=False) * scale
    else:
        end = start + _numbers(path, "duration", found["duration"], whole=False) * scale
    zero = np.zeros(size, np.int64)
    return RunTrace(
        path.stem, kinds, kind.astype(np.int64), ints.get("step", zero), ints.get("replica", zero), rank, stage,
        np.where(compute, ints["microbatch"], NONE), start, end,
    )  # fmt: skip


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
    found = np.full(len(values), np.nan)
    for at, value in enumerate(values.tolist()):
        if value is None or value == "":
            continue
        try:
            found[at] = float(value)
        except ValueError:
            raise TraceError(f"{path.name}, row {at + 2}: {name} is {value!r}: give a number") from None
    if not whole:
        return found
    return whole_numbers(f"{path.name}: column {name}", found)
