"""A `__repr__` of bounded length for dataclasses: values here hold thousands of ops, and a repr is for eyes."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

MOST = 1_000
"""Characters of a repr."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 6
        self.maxstring = self.maxother = 160
        self.maxlevel = 3


def short_repr(value: Any) -> str:
    """`Costs(f=(10.0, 10.0, ...), i=...)`: fields that are not as by default, long ones cut.

    To be set as `__repr__` of a dataclass. Never compare values by it: `==` tells them apart, a repr may not.
    """
    shown = _Short()
    parts = []
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.repr and not _is_default(field, given):
            parts.append(f"{field.name}={shown.repr(given)}")
    text = f"{type(value).__qualname__}({', '.join(parts)})"
    return text if len(text) <= MOST else f"{text[: MOST - 4]}...)"


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and bool(value == field.default)
    return False
