"""Files that are written whole and JSON that is read strictly.

`write_whole` leaves the old file or the new one, never half of one. `read_json` refuses a field that is given twice,
and NaN; `converted` allows only what a type allows. Its errors name the place and its value.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from penstock.schedule import ScheduleError


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


T = TypeVar("T")


def read_json(text: str) -> Any:
    """Reads JSON. Raises ValueError for what is not JSON, NaN, an infinity, or a field given twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def converted(value: Any, form: type[T]) -> T:
    """Makes a msgspec struct, or a list of structs, of what `read_json` read.

    Args:
        form: the type. The descriptions of its fields (`msgspec.Meta`) say in errors what was expected.

    Raises:
        ValueError: names the field, what it holds and what it should hold.
    """
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        why, _, at = str(error).partition(" - at `$")
    place = at.removesuffix("`").removesuffix("[...]").removeprefix(".")
    struct, expected = _described(form, place)
    if named := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", why):
        inside = f"{place}.{named[2]}" if place else named[2]
        problem = "is missing" if named[1].startswith("missing") else "is unknown"
        raise ValueError(f"field {inside!r} {problem}; the fields are {', '.join(struct.__struct_fields__)}")
    got = json.dumps(_found(value, place))
    shown = got if len(got) <= 60 else f"{got[:60]}..."
    field = f"field {place!r}: " if place else ""
    raise ValueError(f"{field}expected {expected or why.removeprefix('Expected ')}, got {shown}")


def _described(form: Any, place: str) -> tuple[Any, str]:
    """The innermost struct on the way to a place, and the description of the innermost field that has one."""
    form, said = next(_structs(form), form), ""
    for name in re.findall(r"[a-z_]\w*", place):
        hint = get_type_hints(form, include_extras=True).get(name)
        said = next((each.description for each in getattr(hint, "__metadata__", ()) if each.description), said)
        form = next(_structs(hint), form)
    return form, said


def _structs(hint: Any) -> Iterator[Any]:
    """The structs that a type hint names."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for each in get_args(hint):
        yield from _structs(each)


def _found(value: Any, place: str) -> Any:
    """What stands at a place. msgspec writes [...] for a key of an object, so the search ends at that object."""
    for name, index in re.findall(r"([a-z_]\w*)|\[(\d+)\]", place.partition("[...]")[0]):
        value = value[name or int(index)]
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of its fields; `json.loads` would take the last of two."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
