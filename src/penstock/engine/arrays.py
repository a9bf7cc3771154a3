"""Names for the arrays that the engine's plain functions take.

The translators and the reader learn from them what an array holds: as C each is a pointer with its length, in Python
a numpy array, or a list, where a function runs as it stands.
"""

from __future__ import annotations

from typing import Any

Array = Any
"""A numpy array, or a list."""

Ints = Any
Floats = Any
Flags = Any
"""Arrays of whole numbers of 64 bits, of floats, and of bools."""

IntRows = Any
FloatRows = Any
FlagRows = Any
"""The same with rows: `rows[k]` is one of them, `rows[k, n]` a number."""

Stop = Any
"""An array of one whole number that another thread sets while a function runs."""
