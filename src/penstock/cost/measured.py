"""Costs from what ops took where they ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from statistics import median

from penstock.cost.costs import Costs

WARMUP_ITERATIONS, MEASURED_ITERATIONS = 2, 3
"""The first iterations are left out (memory is allotted and channels get to know each other); then so many count."""


def costs_of_ops(ms: Mapping[tuple[str, int], float], num_stages: int) -> Costs:
    """Costs from what ops took, by kind and stage.

    Where a stage ran only full backwards, half of one counts for I and half for W; where it ran none, B is I and W
    together.
    """
    stages = range(num_stages)
    full = [ms.get(("B", s), ms.get(("I", s), 0.0) + ms.get(("W", s), 0.0)) for s in stages]
    return Costs(
        f=[ms.get(("F", s), 0.0) for s in stages],
        i=[ms.get(("I", s), full[s] / 2) for s in stages],
        w=[ms.get(("W", s), full[s] / 2) for s in stages],
        b=full,
    )


class MeasuredCosts:
    """Gathers op times of the first iterations until there are enough.

    An iteration with updates in it counts as many times as each stage updates: it is as long as so many steps.

    Args:
        num_updates: how often each stage updates in an iteration; 1 where updates are no ops.
    """

    def __init__(self, num_updates: int = 1) -> None:
        self._num_left_out = ceil(WARMUP_ITERATIONS / num_updates)
        self._num_enough = self._num_left_out + ceil(MEASURED_ITERATIONS / num_updates)
        self._times: dict[tuple[str, int], list[float]] = {}
        self._num_seen = 0

    def feed(self, rows: Iterable[tuple[str, int, float]]) -> Costs | None:
        """Takes an iteration's ops, each as (kind, stage, ms). Returns the costs once they suffice: medians, in ms;
        see `costs_of_ops`.
        """
        self._num_seen += 1
        if self._num_seen <= self._num_left_out:
            return None
        for kind, stage, ms in rows:
            self._times.setdefault((kind, stage), []).append(ms)
        if self._num_seen < self._num_enough:
            return None
        num_stages = 1 + max(stage for _, stage in self._times)
        return costs_of_ops({key: median(times) for key, times in self._times.items()}, num_stages)
