"""Schedules as files. The ending decides the format; for torch's CSV, a dialect decides the form.

ps.save(s, "s.json")     ps.save(s, "s.txt")     ps.save(s, "s.csv")     ps.load("s.csv", dialect="torch")
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.formats.native import from_json, to_json
from penstock.formats.torch_csv import CsvForm, from_torch_csv, to_torch_csv
from penstock.schedule import Schedule, ScheduleError, declare_shown_order, parse, to_text
from penstock.schedule.messages import NCCL, has_communication, remove_communication
from penstock.schedule.schedule import require_schedule

DIALECTS: dict[str, CsvForm | None] = {
    "torch": None,
    "torch:compute_only": "compute_only",
    "torch:compute_comms": "compute_comms",
    "torch:compute_comms_waits": "compute_comms_waits",
}
"""The dialects of `.csv`: torch's CSV as the schedule is, without messages as ops, or with them."""

ENDINGS = (".json", ".txt", ".csv")


def save(schedule: Schedule, path: str | Path, dialect: str | None = None, channels: str = NCCL) -> None:
    """Writes a schedule to a file. The ending decides the format.

    Args:
        schedule: the schedule to write.
        path: a path that ends with `.json` (native JSON), `.txt` (the text grid) or `.csv` (torch's CSV).
        dialect: the form of a `.csv`. "torch" (the default) writes the ops as they are, "torch:compute_only" leaves
            communication ops out, "torch:compute_comms" adds them if the schedule has none, and
            "torch:compute_comms_waits" also has the waits that torch 2.15 and newer ask for.
        channels: what will carry the messages of a `.csv` in torch: "nccl", "gloo", "nccl-pair" or "nccl-edge".
            Messages are placed for it where the schedule has none, and proved for it.

    Raises:
        ScheduleError: another ending or dialect, or a file that can't be written. For `.csv` also a schedule that is
            not valid, or that needs what torch lacks.

    Examples:
        >>> import tempfile, penstock as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.save(ps.build("1f1b", 2, 4), f"{folder}/mine.txt")
        ...     print(ps.load(f"{folder}/mine.txt") == ps.build("1f1b", 2, 4))
        True
    """
    path = path_of(path)
    _check_ending(path, dialect, "written as")
    require_schedule(schedule)
    if path.suffix == ".csv":
        text = to_torch_csv(schedule, DIALECTS[dialect or "torch"], channels)
    else:
        text = to_json(schedule) if path.suffix == ".json" else to_text(schedule) + "\n"
    write_whole(path, text)


def load(path: str | Path, dialect: str | None = None, declare_order: bool = False) -> Schedule:
    """Reads a schedule that `save` wrote. It does not prove the schedule; `ps.check` does.

    Args:
        path: a path that ends with `.json`, `.txt` or `.csv`.
        declare_order: whether the schedule declares the order of microbatches that its rows show, if that is not the
            ascending one that `check` expects. A CSV can't declare it. Gradients are then summed in the rows' order.
        dialect: the form of a `.csv`. "torch" (the default) keeps its communication ops, "torch:compute_only" leaves
            them out, and "torch:compute_comms" adds them if there are none, like "torch:compute_comms_waits". A CSV
            holds no name, so the schedule gets the file's.

    Raises:
        ScheduleError: another ending or dialect, or a file that can't be read. The error names the file and what is
            wrong in it.

    Examples:
        >>> import tempfile, penstock as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.save(ps.build("zb-v", 4, 8), f"{folder}/zb-v.csv", dialect="torch:compute_only")
        ...     print(ps.load(f"{folder}/zb-v.csv").name)
        zb-v
    """
    path = path_of(path)
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
    text = path.read_text(encoding="utf-8-sig")
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
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        raise ScheduleError(f"no dialect {dialect!r}; there are {', '.join(DIALECTS)}", rule="options")
    if path.suffix != ".csv":
        raise ScheduleError(f"{path}: dialect {dialect!r} is for .csv files; leave it out", rule="options")


def _in_form(schedule: Schedule, form: CsvForm | None) -> Schedule:
    if form == "compute_only":
        return remove_communication(schedule)
    if form is None or has_communication(schedule):
        return schedule
    from penstock.passes.communication import add_communication  # here, since other forms need no passes

    return add_communication(schedule)


def _name_of(path: Path) -> str:
    """A name for a schedule, made from the file's name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).lstrip("._+-") or "torch"


def path_of(given: object) -> Path:
    """A path given as text or as a Path. Raises ScheduleError for any other type, or for an invalid path."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise ScheduleError(f"a file is named by text or a Path, got {type(given).__name__}", rule="file")
    if "\0" in text:
        raise ScheduleError(f"{text!r}: a path holds no zero byte", rule="file")
    return Path(text)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole: if the process is killed, the old file or the new one is there, never half of one.

    A link stays a link, and what is no file, such as /dev/null or a pipe, is written into.

    Raises:
        ScheduleError: it can't be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if _is_device(path):
            path.write_bytes(data)
            return
        with replaced(_target(path)) as beside:
            beside.write_bytes(data)
    except OSError as error:
        raise _cannot_write(path, error) from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Around the writing of a file: beside `path`, whose place it takes at the end; it goes where writing fails.

    Raises OSError as the disk does.
    """
    beside = _beside(path)
    try:
        yield beside
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def require_place(path: Path) -> None:
    """Finds out whether `write_whole` can write a file, before the work whose result it is for.

    Raises:
        ScheduleError: it can't.
    """
    try:
        if _is_device(path):
            with path.open("ab"):
                return
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        beside = _beside(_target(path))
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _cannot_write(path: Path, error: OSError) -> ScheduleError:
    hint = "; name a file in a folder that is there" if isinstance(error, FileNotFoundError) else ""
    return ScheduleError(f"{path}: {error.strerror or error}{hint}", rule="file")
