"""Reads a trace of a run, whatever wrote it: the ending of the file says which form it has.

run.parquet             ByteDance's study; with columns, any table
run.csv                 a table with named columns
rank0.json.gz ...       torch's profiler, one file per rank; or one trace of all ranks, as Penstock writes it
runs/mine/              a folder of such files, or of a Penstock run
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.formats.traces.chrome import read_chrome
from penstock.formats.traces.op_names import kind_named, parse_pattern
from penstock.formats.traces.run_trace import NONE, RunTrace, Scope, TracedOp, TraceError, trace_of
from penstock.formats.traces.table import read_table

HEAD = 1 << 20
"""Bytes of a JSON file that show whether it is a trace."""
CHROME = (".json", ".json.gz", ".pt.trace.json", ".trace.json")


def read_trace(
    paths: str | Path | Sequence[str | Path],
    *,
    patterns: Sequence[str] = (),
    preset: str | None = None,
    columns: Mapping[str, str] | None = None,
    unit: str = "ms",
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    steps: Iterable[int] | None = None,
) -> RunTrace:
    """The ops of a recorded run.

    Args:
        paths: a file, a folder, or the files of all ranks.
        patterns, preset, num_ranks, num_microbatches: of profiles; see `chrome.read_chrome`. A pattern is a regular
            expression with groups, or OP=EXPRESSION.
        columns, unit: of tables; see `table.read_table`.
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
    if form != "chrome":
        asked = {"pattern": patterns, "preset": preset, "ranks": num_ranks, "microbatches": num_microbatches}
        if useless := [option for option, value in asked.items() if value]:
            raise TraceError(
                f"{given[0].name}: --{useless[0]} says what names in profiles mean, and this is no profile; leave it "
                "out, or say by --column which column is which"
            )
    if form == "table":
        trace = read_table(given[0], columns, unit)
    elif form == "penstock":
        trace = read_penstock(given[0], name=name)
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
            f"the run changed its plan {len(configurations) - 1} times; choose iterations of one with --only-steps"
        )
    return trace_of(name, rows, kind_named, notes)
