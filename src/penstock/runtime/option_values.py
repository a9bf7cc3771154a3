"""Checks of single values that a user gave as options: a wrong one is an error that names the option."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from penstock.runtime.errors import RuntimeFailure


def is_number(value: Any) -> bool:
    """Whether it is a real number: neither a bool nor NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def is_amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return is_number(value) and 0 <= value < math.inf


def is_count(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def require_value(fits: bool, what: str, given: Any, wanted: str) -> None:
    """Raises RuntimeFailure unless a value fits.

    Args:
        what: the option. wanted: what it takes, in words.
    """
    if not fits:
        text = repr(given)
        shown = text if len(text) <= 60 else f"a {type(given).__name__}"
        raise RuntimeFailure(f"{what} is {shown}; give {wanted}")
