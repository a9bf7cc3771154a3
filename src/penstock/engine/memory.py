"""What rows hold as they run in a given order. Timing has no part in it: a row runs one op at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Array = Any
"""A numpy array, or a list of numbers."""


def peaks(change: Array, first: Sequence[int]) -> list[float]:
    """The most that each row holds at once.

    Args:
        change: of each op, in the order of the rows, what it adds from its start on, or gives back at its end where
            that is below 0.
        first: row r has ops `first[r]` to `first[r + 1] - 1`.
    """
    change = np.asarray(change)
    return [np.cumsum(change[a:b]).max(initial=0).item() for a, b in pairwise(first)]


def levels(change: Array, first: Sequence[int], row: int) -> list[float]:
    """What a row holds from the start of each of its ops; after its end, where the op gives back."""
    found: list[float] = np.cumsum(np.asarray(change)[first[row] : first[row + 1]]).tolist()
    return found
