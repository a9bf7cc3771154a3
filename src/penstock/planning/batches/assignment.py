"""Deals items out to replicas: equally many to each, and the busiest has hardly more work than the mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.tolerance import EPSILON
from penstock.schedule import ScheduleError
from penstock.schedule.columns import Array

MOST_SWAPS = 200
ENOUGH = 1e-4
"""Where the busiest group is above the mean by no more than this share of it, swapping ends."""


def assign_evenly(work: Sequence[float] | Array, num_groups: int) -> list[list[int]]:
    """Items into groups of equally many, their sums of work as even as swaps make them.

        work 9 8 3 2 in 2 groups:  [9 2] [8 3]

    The longest come first, each to the group with least work that has room. Then the busiest group swaps one item for
    one of another group, by which the busier of the two becomes least busy; until no swap helps.

    Args:
        work: of each item, in any unit.
        num_groups: how many groups.

    Raises:
        ScheduleError: work that is no row of numbers of at least 0, or that does not divide by the groups.

    Examples:
        >>> import penstock as ps
        >>> ps.planning.assign_evenly([9, 8, 3, 2], 2)
        [[0, 3], [1, 2]]
    """
    items = np.asarray(work, np.float64)
    if items.ndim != 1 or not np.isfinite(items).all() or (items < 0).any():
        raise ScheduleError("the work to assign must be a row of numbers of at least 0", rule="options")
    if num_groups < 1 or len(items) % num_groups or not len(items):
        raise ScheduleError(
            f"{len(items)} items can't be assigned to {num_groups} groups of the same size; give a multiple "
            "of that number",
            rule="options",
        )
    size = len(items) // num_groups
    groups = _longest_first(items, num_groups, size)
    _swap(items, groups)
    return [sorted(group) for group in groups.tolist()]


def _longest_first(items: Array, num_groups: int, size: int) -> Array:
    groups = np.zeros((num_groups, size), np.int64)
    counts, sums = np.zeros(num_groups, np.int64), np.zeros(num_groups)
    for item in np.argsort(-items, kind="stable"):
        group = int(np.argmin(sums))
        groups[group, counts[group]] = item
        counts[group] += 1
        sums[group] = sums[group] + items[item] if counts[group] < size else np.inf
    return groups


def _swap(items: Array, groups: Array) -> None:
    """Makes the busiest group less busy, swap by swap."""
    held = items[groups]  # groups, size
    sums = held.sum(axis=1)
    enough = sums.mean() * (1 + ENOUGH)
    for _ in range(MOST_SWAPS):
        most = int(np.argmax(sums))
        if sums[most] <= enough:
            return
        change = held[most][:, None, None] - held[None]  # own item, group, its item
        busier = np.maximum(sums[most] - change, sums[None, :, None] + change)
        busier[:, most] = np.inf
        best = int(np.argmin(busier))
        if not busier.flat[best] < sums[most] * (1 - EPSILON):
            return
        own, group, other = np.unravel_index(best, busier.shape)
        moved = change[own, group, other]
        for table in (groups, held):
            table[most, own], table[group, other] = table[group, other], table[most, own]
        sums[most] -= moved
        sums[group] += moved
