"""The native JSON of a schedule: versioned, strict, and written beside and renamed.

{"format": "penstock-schedule", "version": 1, "name": "1f1b",
 "placement": [[0, 1]], "microbatch_pipeline": [0, 0], "memory_limit": null,
 "order": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from penstock.schedule import Op, Placement, Schedule, ScheduleError, parse, parse_op, to_text

FORMAT, VERSION = "penstock-schedule", 1
MAX_FLOAT = sys.float_info.max


def to_json(schedule: Schedule) -> str:
    """The schedule as native JSON."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "placement": schedule.placement.pipelines,
        "microbatch_pipeline": schedule.microbatch_pipeline,
        "memory_limit": schedule.memory_limit,
        "order": [[str(op) for op in row] for row in schedule.order],
    }
    return json.dumps(value)


def from_json(text: str) -> Schedule:
    """Reads native JSON; raises ScheduleError that names the field, what it holds and what it should."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"not JSON: {error}", rule="json") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ScheduleError(f'not a schedule: a JSON object with "format": "{FORMAT}" is needed', rule="json")
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ScheduleError(f"version is {version!r}: a whole number from 1 is needed", rule="json")
    if version > VERSION:
        raise ScheduleError(
            f"the schedule is in format version {version}, this Penstock reads up to {VERSION}; upgrade it",
            rule="json",
        )
    known = {"format", "version", "name", "placement", "microbatch_pipeline", "memory_limit", "order"}
    if unknown := sorted(set(value) - known):
        raise ScheduleError(f"unknown field {unknown[0]!r} in version {version}", rule="json")
    name = _field(value, "name", isinstance(value.get("name"), str), "a string")
    placement = _field(
        value, "placement", _is_table(value.get("placement"), _is_int), "lists of ranks, one a pipeline"
    )
    pipeline_of = _field(
        value,
        "microbatch_pipeline",
        _is_list(value.get("microbatch_pipeline"), _is_int),
        "a list of pipelines",
    )
    rows = _field(value, "order", _is_table(value.get("order"), _is_str), "lists of ops, one a rank")
    limit = value.get("memory_limit")
    if limit is not None:
        _field(value, "memory_limit", _is_number(limit), "a number above 0, or null")
    order = tuple(tuple(_op(text, rank, step) for step, text in enumerate(row)) for rank, row in enumerate(rows))
    return Schedule(
        name,
        Placement(tuple(tuple(ranks) for ranks in placement)),
        order,
        tuple(pipeline_of),
        None if limit is None else float(limit),
    )


def save(schedule: Schedule, path: str | Path) -> None:
    """Writes the schedule: `.json` native JSON, `.txt` the text grid. Raises ScheduleError for other endings."""
    path = Path(path)
    writers = {".json": to_json, ".txt": lambda s: to_text(s) + "\n"}
    if path.suffix not in writers:
        raise ScheduleError(f"{path}: schedules are written as .json or .txt, not {path.suffix!r}", rule="file")
    write_whole(path, writers[path.suffix](schedule))


def load(path: str | Path) -> Schedule:
    """Reads what `save` writes. Raises ScheduleError that names the file and what is wrong in it."""
    path = Path(path)
    readers = {".json": from_json, ".txt": parse}
    if path.suffix not in readers:
        raise ScheduleError(f"{path}: schedules are read from .json or .txt, not {path.suffix!r}", rule="file")
    try:
        return readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror or error}", rule="file") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: not text", rule="file") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", rule=error.rule) from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that a kill at any moment leaves the old one or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ScheduleError(f"{path}: {error.strerror or error}", rule="file") from None


def _field(value: dict[str, Any], name: str, right: bool, expected: str) -> Any:
    if not right:
        got = json.dumps(value[name])[:60] if name in value else "nothing"
        raise ScheduleError(f"field {name!r}: expected {expected}, got {got}", rule="json")
    return value[name]


def _op(text: str, rank: int, step: int) -> Op:
    try:
        return parse_op(text)
    except ValueError as error:
        raise ScheduleError(f"order, rank {rank}, step {step}: {error}", rule="json") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_FLOAT


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any, item: Any) -> bool:
    return isinstance(value, list) and all(item(v) for v in value)


def _is_table(value: Any, item: Any) -> bool:
    return isinstance(value, list) and all(_is_list(row, item) for row in value)
