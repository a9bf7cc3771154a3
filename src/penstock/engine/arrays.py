"""Names for the arrays that the engine's plain functions take.

The translators and the reader learn from them what an array holds: as C each is a pointer with its length, in Python
a numpy array, or a list, where a function runs as it stands.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import numpy as np

Array = Any
"""A numpy array, or a list."""

Ints = Any
Floats = Any
Flags = Any
"""Arrays of whole numbers of 64 bits, of floats, and of bools."""

IntRows = Any
FloatRows = Any
"""The same with rows: `rows[k]` is one of them, `rows[k, n]` a number."""

Heap = Any
"""A heap of (float, whole number), by `heapq`."""

Stop = Any
"""An array of one whole number that another thread sets while a function runs."""

Record = TypeVar("Record", bound=NamedTuple)


def prepared(record: Record, as_c: bool) -> Record:
    """A named tuple of arrays as the engine's functions take it: contiguous arrays for C, lists for Python."""
    made: list[Any] = []
    for value, kind in zip(record, _numpy_types(type(record)), strict=True):
        made.append(value if value is None or kind is None else taken(value, kind, as_c))
    return record._make(made)


@functools.cache
def _numpy_types(record: type) -> list[type | None]:
    """What the array of each field holds; None for other fields."""
    words = (getattr(each, "__forward_arg__", each) for each in record.__annotations__.values())
    return [{"Ints": np.int64, "Floats": np.float64}.get(str(word)) for word in words]


def taken(values: Array, kind: type, as_c: bool) -> Array:
    """Numbers as the engine's functions take them; args as of `prepared`."""
    if as_c:
        return np.ascontiguousarray(values, kind)
    return values if isinstance(values, list) else np.asarray(values, kind).tolist()


def copied(record: Record) -> Record:
    """A named tuple of arrays with copies of them, which a run may write to."""
    return record._make(value.copy() if hasattr(value, "copy") else value for value in record)
