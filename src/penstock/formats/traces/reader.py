"""Reads a trace of a run, whatever wrote it: the ending of the file says which form it has.

    run.parquet             ByteDance's study; with columns, any table
    run.csv                 a table with named columns
    rank0.json.gz ...       torch's profiler, one file per rank; or one trace of all ranks, as Penstock writes it
    runs/mine/              a folder of such files, or of a Penstock run

A table has one row an op:

    op,stage,microbatch,rank,step,start,end
    F,0,0,0,0,0.0,10.2

Names that differ are given: {"microbatch": "mb", "op": "phase"}. Needed are op, stage, microbatch, start, and end or
duration; rank is the stage, replica and step are 0 where there is no column. A parquet file has the columns of
ByteDance's straggler study (OSDI 2025) where nothing else is said:

    dp_rank  stage  rank  step  optype  start_ts  duration  seq_id  mc  mb_id  gmc

`stage` is the rank within its pipeline, `mc` a rank's model chunk and `gmc` the stage as we count it; times are
seconds. https://github.com/ByteDance-Seed/StragglerAnalysis has three traces and describes the columns.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.extras import what_to_install
from penstock.formats.traces.chrome import read_chrome
from penstock.formats.traces.run_trace import (
    NONE,
    Array,
    RunTrace,
    Scope,
    TracedOp,
    TraceError,
    kind_named,
    parse_pattern,
    trace_of,
    whole_numbers,
)

COLUMNS = ("op", "stage", "microbatch", "rank", "replica", "step", "start", "end", "duration")
STUDY = {
    "op": "optype", "stage": "gmc", "microbatch": "mb_id", "rank": "stage", "replica": "dp_rank", "step": "step",
    "start": "start_ts", "duration": "duration",
}  # fmt: skip
"""The study's names of our columns."""
JOBS = ("job", "job_id", "trial", "trial_name", "run_id")
"""Columns that would tell jobs apart."""
UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


def read_table(path: Path, columns: Mapping[str, str] | None = None, unit: str | None = None) -> RunTrace:
    """Reads a table.

    Args:
        columns: the table's name for each of `COLUMNS` that it calls otherwise.
        unit: of times. Default: milliseconds, and seconds for a study's table.

    Raises:
        TraceError: a column is missing, a cell is no number, it holds several jobs, or it can't be read.
    """
    given = dict(columns or {})
    if unknown := sorted(given.keys() - set(COLUMNS)):
        raise TraceError(f"column {unknown[0]!r}: a trace has {', '.join(COLUMNS)}")
    if unit not in (None, *UNITS):
        raise TraceError(f"unit {unit!r}: give {', '.join(UNITS)}")
    read = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    is_study = path.suffix == ".parquet" and not given and "op" not in read
    if is_study:
        given = STUDY
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
    scope = np.array([each.scope for each in kinds], object)[kind]
    compute, message = scope == Scope.COMPUTE, (scope == Scope.SEND) | (scope == Scope.RECEIVE)
    microbatch = np.where(compute | (message & (stage != NONE)), ints["microbatch"], NONE)
    if is_study and "mc" in read and compute.any():  # what reduces or gathers a chunk says which stage that is
        chunk = _numbers(path, "mc", read["mc"])
        stage = np.where((stage == NONE) & (chunk != NONE), chunk * (int(rank[compute].max()) + 1) + rank, stage)
    scale = UNITS[unit or ("s" if is_study else "ms")]
    times = {
        name: _numbers(path, given.get(name, name), found[name], whole=False) * scale
        for name in COLUMNS[6:]
        if name in found
    }
    start = times["start"]
    end = times["end"] if "end" in times else start + times["duration"]
    zero = np.zeros(len(kind), np.int64)
    return RunTrace(
        path.stem, kinds, kind.astype(np.int64), ints.get("step", zero), ints.get("replica", zero), rank, stage,
        microbatch, start, end,
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
    except ImportError as error:
        raise TraceError(f"{path.name} is parquet: {what_to_install(error) or error}; or convert it to CSV") from None
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


HEAD = 1 << 20
"""Bytes of a JSON file that show whether it is a trace."""
CHROME = (".json", ".json.gz", ".pt.trace.json", ".trace.json")


def read_trace(
    paths: str | Path | Sequence[str | Path],
    *,
    patterns: Sequence[str] = (),
    preset: str | None = None,
    columns: Mapping[str, str] | None = None,
    unit: str | None = None,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    steps: Iterable[int] | None = None,
) -> RunTrace:
    """The ops of a recorded run.

    Args:
        paths: a file, a folder, or the files of all ranks.
        patterns, preset, num_ranks, num_microbatches: of profiles; see `chrome.read_chrome`. A pattern is a regular
            expression with groups, or OP=EXPRESSION.
        columns, unit: of tables; see `read_table`.
        steps: only these.

    Raises:
        TraceError: there is no such file, it has another form, lacks what is needed, or holds two jobs.
    """
    given = [Path(each) for each in ([paths] if isinstance(paths, str | Path) else paths)]
    if not given:
        raise TraceError("no trace is given: name a file, a folder, or the files of all ranks")
    for path in given:
        if not path.exists():
            raise TraceError(f"{path}: there is no such file or folder")
    name = given[0].name.split(".")[0] if len(given) == 1 else given[0].resolve().parent.name
    if len(given) == 1 and given[0].is_dir():
        name = given[0].resolve().name
        given = _in_folder(given[0])
    kinds = {_form(path) for path in given}
    if len(kinds) > 1 or (len(given) > 1 and kinds != {"chrome"}):
        shown = ", ".join(path.name for path in given[:4])
        raise TraceError(f"{shown}: give one table, one run, or the profiles of all ranks of one job")
    form = kinds.pop()
    of_profiles = {"pattern": patterns, "framework": preset, "ranks": num_ranks, "microbatches": num_microbatches}
    for asked, wanted, why in (
        (of_profiles, "chrome", "says what names in profiles mean, and this is no profile"),
        ({"column": columns, "unit": unit}, "table", "says how a table is read, and this is no table"),
    ):
        if form != wanted and (useless := [option for option, value in asked.items() if value]):
            raise TraceError(f"{given[0].name}: --{useless[0]} {why}; leave it out")
    if form == "table":
        trace = read_table(given[0], columns, unit)
    elif form == "penstock":
        return read_penstock(given[0], name=name, steps=None if steps is None else set(steps))
    else:
        trace = read_chrome(
            given,
            name=name,
            patterns=[parse_pattern(each) for each in patterns],
            preset=preset,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
        )
    return trace if steps is None else _only(trace, set(steps))


def _in_folder(folder: Path) -> list[Path]:
    """The trace files of a folder."""
    if (folder / TIMELINES).is_file():
        return [folder / TIMELINES]
    below = sorted(folder.glob(f"*/{TIMELINES}"))
    if len(below) == 1:
        return below
    if len(below) > 1:
        raise TraceError(f"{folder} holds {len(below)} runs: give one, like {below[0].parent}")
    if (folder / TIMELINE).is_file():  # of a run of Penstock, beside other JSON
        return [folder / TIMELINE]
    profiles = sorted(path for path in folder.iterdir() if path.name.endswith(CHROME))
    profiles = [path for path in profiles if _holds_events(path)] or profiles  # a configuration may lie beside them
    tables = sorted(path for path in folder.iterdir() if path.suffix in (".parquet", ".csv"))
    if len(tables) > 1 or (profiles and tables):
        also = f" and {len(profiles)} JSON files" if profiles else ""
        raise TraceError(f"{folder} holds {len(tables)} tables{also}: give one, like {tables[0]}")
    if found := profiles or tables:
        return found
    raise TraceError(
        f"{folder} holds no trace: a run of Penstock has {TIMELINES} (train with --adapt), torch's profiler writes "
        ".json or .json.gz, tables are .csv or .parquet"
    )


def _holds_events(path: Path) -> bool:
    """Whether a JSON file begins as Chrome's format does; also one that can't be read, so that its error is said."""
    try:
        with path.open("rb") as raw:
            is_zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            head = file.read(HEAD).lstrip()
    except (OSError, EOFError, zlib.error):
        return True
    return b'"traceEvents"' in head or head.startswith(b"[")


def _form(path: Path) -> str:
    if path.name.endswith(CHROME):
        return "chrome"
    form = {".parquet": "table", ".csv": "table", ".jsonl": "penstock"}.get(path.suffix)
    if form is None:
        raise TraceError(
            f"{path.name}: give a .parquet, a .csv, a .json or .json.gz of a profiler, or a run's folder"
        )
    return form


def _only(trace: RunTrace, steps: set[int]) -> RunTrace:
    """A trace of some steps."""
    if lacks := sorted(steps - set(trace.steps.tolist())):
        there = trace.steps.tolist()
        shown = ", ".join(map(str, there[:8])) + (" ..." if len(there) > 8 else "")
        raise TraceError(f"{trace.name} has no step {lacks[0]}; it has {shown}")
    return trace.take(np.isin(trace.step, sorted(steps)))


TIMELINES, ITERATIONS = "timelines.jsonl", "iterations.jsonl"
"""What a run with `--adapt` records: the ops of iterations before and after each change, and each iteration."""
TIMELINE = "timeline.json"
"""What other runs leave: the trace of one step, measured and simulated."""


class IterationRecord(msgspec.Struct):
    """A line of timelines.jsonl or of iterations.jsonl: an iteration, and the number of the decision in force.

    Attributes:
        ops: timelines have of each its rank, kind, stage, microbatch, start and end (ms).
        why: what the timeline is recorded for.
        peaks, counters: iterations have the most that each rank held, and what the delegates of all ranks counted.
    """

    iteration: int
    number: int
    ops: list[tuple[int, str, int, int, float, float]] = []
    why: str = ""
    peaks: list[float] | None = None
    counters: dict[str, int | float] | None = None


def read_penstock(path: Path, *, name: str, steps: set[int] | None = None) -> RunTrace:
    """Reads the timelines of a run: of the steps given or, without them, of the plan that most of its iterations ran.

    Steps of several plans have other orders, links and dispatches, so that figures over all would be those of none.

    Raises:
        TraceError: a line that is no record of an iteration, or a step that is not there.
    """
    records = {record.iteration: record for record in _records(path)}.values()
    if not records:
        raise TraceError(f"{path.name} has no record of an iteration; train for more steps")
    rows = []
    for record in records:
        for rank, op, stage, microbatch, start, end in record.ops:
            number_of = microbatch if kind_named(op).scope is Scope.COMPUTE else NONE
            rows.append(TracedOp(op, record.iteration, 0, rank, stage, number_of, start, end))
    trace = trace_of(name, rows)
    by_plan: dict[int, list[int]] = {}
    for record in records:
        by_plan.setdefault(record.number, []).append(record.iteration)
    if steps is not None:
        plans = [number for number, recorded in by_plan.items() if steps & set(recorded)]
        found = _only(trace, steps)
        mixed = (
            f"these steps ran {len(plans)} plans, and figures are means over them; --only-steps chooses those of one"
        )
        return found.with_note(mixed) if len(plans) > 1 else found
    if len(by_plan) == 1:
        return trace
    beside = path.with_name(ITERATIONS)
    ran = Counter(each.number for each in (_records(beside) if beside.is_file() else records))
    longest = max(by_plan, key=lambda number: (ran[number], number))
    others = ", ".join(f"{_listed(by_plan[number])} (plan {number})" for number in by_plan if number != longest)
    return _only(trace, set(by_plan[longest])).with_note(
        f"the run changed its plan: shown is plan {longest}, which {ran[longest]} iterations ran, by its steps "
        f"{_listed(by_plan[longest])}; --only-steps chooses steps of another: {others}"
    )


def _listed(steps: Sequence[int]) -> str:
    return ",".join(map(str, steps))


def _records(path: Path) -> list[IterationRecord]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise TraceError(f"{path.name} is no text") from None
    return iteration_records(lines, path.name)


def iteration_records(
    lines: Iterable[str], file: str, failure: type[Exception] = TraceError
) -> list[IterationRecord]:
    """The lines of a run's timelines, or of its iterations; the last one may be cut off where the run was.

    Args:
        file: its name, for errors.
        failure: raised for a line that is no record of an iteration.
    """
    rows = [line for line in lines if line.strip()]
    found = []
    for number, line in enumerate(rows, start=1):
        try:
            found.append(msgspec.convert(json.loads(line), IterationRecord))
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            if number == len(rows) and isinstance(error, json.JSONDecodeError):
                break
            raise failure(f"{file}, line {number}, is no record of an iteration: {line[:60]!r}: {error}") from None
    return found
