"""Schedules as files: the ending says the format, and for torch's CSV a dialect says the form.

ps.save(s, "s.json")     ps.save(s, "s.txt")     ps.save(s, "s.csv")     ps.load("s.csv", dialect="torch")
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.formats.native import from_json, to_json
from penstock.formats.torch_csv import from_torch_csv
from penstock.formats.torch_csv_write import Form, to_torch_csv
from penstock.passes.communication import add_communication
from penstock.schedule import Schedule, ScheduleError, declare_shown_order, parse, to_text
from penstock.schedule.messages import has_communication, remove_communication

DIALECTS: dict[str, Form | None] = {
    "torch": None,
    "torch:compute_only": "compute_only",
    "torch:compute_comms": "compute_comms",
}
"""The dialects of `.csv`: torch's in the form that is there, without messages as ops, or with them."""

ENDINGS = (".json", ".txt", ".csv")


def save(schedule: Schedule, path: str | Path, dialect: str | None = None) -> None:
    """Writes the schedule: `.json` native JSON, `.txt` the text grid, `.csv` torch's CSV.

    Args:
        dialect: of a `.csv`; "torch" (the default) writes what is there, "torch:compute_only" leaves
            communication ops out, "torch:compute_comms" adds them where the schedule has none.

    Raises:
        ScheduleError: another ending or dialect, a disk that does not take it, or, for `.csv`, a schedule that
            is not valid or needs what torch lacks.
    """
    path = Path(path)
    _check_ending(path, dialect, "written as")
    if path.suffix == ".csv":
        text = to_torch_csv(schedule, DIALECTS[dialect or "torch"])
    else:
        text = to_json(schedule) if path.suffix == ".json" else to_text(schedule) + "\n"
    write_whole(path, text)


def load(path: str | Path, dialect: str | None = None, declare_order: bool = False) -> Schedule:
    """Reads what `save` writes; what is read is not proved, `ps.check` does that.

    Args:
        declare_order: declares the order of microbatches that the rows show, where it is not the ascending one that
            `check` expects. A CSV can't say it; gradients are then summed as the rows have it.
        dialect: of a `.csv`; "torch" (the default) keeps its communication ops, "torch:compute_only" leaves
            them out, "torch:compute_comms" adds them where there are none. A CSV holds no name: the file's is taken.

    Raises:
        ScheduleError: names the file and what is wrong in it, or another ending or dialect.
    """
    path = Path(path)
    _check_ending(path, dialect, "read from")
    try:
        return _read(path, dialect, declare_order)
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror or error}", rule="file") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: not text", rule="file") from None
    except ScheduleError as error:
        raise error.in_file(path) from None


def _read(path: Path, dialect: str | None, declare_order: bool) -> Schedule:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        found = from_torch_csv(text, name=_name_of(path))
    else:
        found = from_json(text) if path.suffix == ".json" else parse(text)
    if declare_order:
        found = declare_shown_order(found)
    return _in_form(found, DIALECTS[dialect or "torch"]) if path.suffix == ".csv" else found


def _check_ending(path: Path, dialect: str | None, done: str) -> None:
    if path.suffix not in ENDINGS:
        raise ScheduleError(f"{path}: schedules are {done} .json, .txt or .csv, not {path.suffix!r}", rule="file")
    if dialect is None:
        return
    if dialect not in DIALECTS:
        raise ScheduleError(f"no dialect {dialect!r}; there are {', '.join(DIALECTS)}", rule="options")
    if path.suffix != ".csv":
        raise ScheduleError(f"{path}: dialect {dialect!r} is for .csv files; leave it out", rule="options")


def _in_form(schedule: Schedule, form: Form | None) -> Schedule:
    if form == "compute_only":
        return remove_communication(schedule)
    return add_communication(schedule) if form and not has_communication(schedule) else schedule


def _name_of(path: Path) -> str:
    """A schedule's name made from the file's."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).lstrip("._+-") or "torch"


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that a kill at any moment leaves the old one or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ScheduleError(f"{path}: {error.strerror or error}", rule="file") from None
