"""A `__repr__` of bounded length for dataclasses: values here hold thousands of ops, and a repr is for eyes."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

MOST = 1_000
"""Characters of a repr."""


def short_repr(value: Any) -> str:
    """`Costs(f=(10.0, 10.0, ...), i=...)`: fields that are not as by default, long ones cut.

    To be set as `__repr__` of a dataclass. Never compare values by it: `==` tells them apart, a repr may not.
    """
    shown = reprlib.Repr()
    shown.maxtuple = shown.maxlist = shown.maxdict = shown.maxset = shown.maxfrozenset = 6
    shown.maxstring, shown.maxother, shown.maxlevel = 160, 160, 3
    parts = []
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        is_default = type(given) is type(field.default) and bool(given == field.default)
        if field.repr and not is_default:
            parts.append(f"{field.name}={shown.repr(given)}")
    text = f"{type(value).__qualname__}({', '.join(parts)})"
    return text if len(text) <= MOST else f"{text[: MOST - 4]}...)"
