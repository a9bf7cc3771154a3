"""What rows hold as they run in a given order. Timing has no part in it: a row runs one op at a time, and where some
ops run beside it, on a stream of its own, the most that it may hold is counted, however late these are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
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
    length = first[1] - first[0] if len(first) > 1 else 0
    if length and all(b - a == length for a, b in pairwise(first)):
        rows = change[first[0] : first[-1]].reshape(-1, length)
        found: list[float] = rows.cumsum(axis=1).max(axis=1, initial=0).tolist()
        return found
    return [np.cumsum(change[a:b]).max(initial=0).item() for a, b in pairwise(first)]


def peaks_in_sequence(ops: Iterable[tuple[Sequence[int], float, float]], num_rows: int) -> list[float]:
    """The most that each row holds at once, of ops in one sequence for all rows.

    Args:
        ops: the rows of each op, what it adds to each of them at its start, and what it gives back at its end.
    """
    change: list[list[float]] = [[] for _ in range(num_rows)]
    for rows, takes, gives in ops:
        for row in rows:
            change[row] += [takes, -gives]
    return peaks(list(chain(*change)), list(accumulate(map(len, change), initial=0)))


def levels(change: Array, first: Sequence[int], row: int) -> list[float]:
    """What a row holds from the start of each of its ops; after its end, where the op gives back."""
    found: list[float] = np.cumsum(np.asarray(change)[first[row] : first[row + 1]]).tolist()
    return found


def levels_at_most(
    changes: Sequence[float], is_apart: Sequence[bool], awaited: Sequence[int], room: float = math.inf
) -> tuple[list[float], list[tuple[int, int]]]:
    """What a rank holds at most from the start of each op of its order, however late its stream is.

    Args:
        changes: of each op, what it takes at its start or gives back at its end.
        is_apart: whether it is on the stream.
        awaited: how many of the stream's ops have ended when the rank starts an op, by what that needs.
        room: more than that is not held where waiting helps.

    Returns:
        The levels, and (place of an op, how many ops of the stream it waits for besides) of those that wait for room.
    """
    levels: list[float] = []
    waits: list[tuple[int, int]] = []
    own = before = 0.0  # what the ops of the row hold together, and those of the stream that have ended for sure
    open_ones: deque[float] = deque()  # the changes of those of the stream that it came to, and may not have ended
    come_to = ended = 0
    for place, change in enumerate(changes):
        if is_apart[place]:
            levels.append(own + before + sum(open_ones) + max(change, 0.0))
            open_ones.append(change)
            come_to += 1
            continue
        while open_ones and ended < awaited[place]:
            before += open_ones.popleft()
            ended += 1
        found = own + change + before + _most(open_ones)
        if change > 0 and found > room:
            left = list(open_ones)
            for more in range(1, len(left) + 1):
                if (later := own + change + before + sum(left[:more]) + _most(left[more:])) <= room:
                    waits.append((place, ended + more))
                    for _ in range(more):
                        before += open_ones.popleft()
                    ended, found = ended + more, later
                    break
        own += change
        levels.append(found)
    return levels, waits


def _most(changes: Iterable[float]) -> float:
    """Most that ops one after the other hold, from before the first to after the last."""
    held = most = 0.0
    for change in changes:
        most = max(most, held + change)
        held += change
    return most
