"""The costs of a job, read off its first iterations: the median time of each kind of op on each stage."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from penstock.cost import Costs
from penstock.runtime.adapt.report import RankReport

FIRST, COUNT = 2, 3
"""The first iterations are left out (memory is allotted and channels get to know each other); then so many count."""


class MeasuredCosts:
    """Gathers op times until there are enough."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._times: dict[tuple[str, int], list[float]] = {}
        self._num_seen = 0

    def feed(self, reports: Sequence[RankReport]) -> Costs | None:
        """Takes an iteration's reports; returns the costs when they suffice."""
        self._num_seen += 1
        if self._num_seen <= FIRST:
            return None
        for report in reports:
            for kind, stage, _, start, end in report.ops:
                self._times.setdefault((kind, stage), []).append(end - start)
        return self.costs() if self._num_seen >= FIRST + COUNT else None

    def costs(self) -> Costs:
        """Milliseconds. Where a stage ran only full backwards, half of one counts for I and half for W."""
        middle = {key: median(times) for key, times in self._times.items()}
        stages = range(self._num_stages)
        full = [middle.get(("B", s), middle.get(("I", s), 0.0) + middle.get(("W", s), 0.0)) for s in stages]
        return Costs(
            f=[middle.get(("F", s), 0.0) for s in stages],
            i=[middle.get(("I", s), full[s] / 2) for s in stages],
            w=[middle.get(("W", s), full[s] / 2) for s in stages],
            b=full,
        )
