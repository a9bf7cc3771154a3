"""JSON read strictly: no field twice, no NaN, and only what a type allows. An error names the place and its value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

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
