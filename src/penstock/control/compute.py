"""What is known of a stage's ops: how long they take, and when that changed.

    ms of F + I + W, stage 3
     |                       x x x x x x x
     |                                          factors  F 1.3, I 1.3, W 1.3: costs from now on
     | x x x x x x x x x x x
     +------------------------------------- half iterations

A stage is watched as a whole, with the change points of links (changes.py), and each kind of op gets a factor of its
own: how many times as long it takes as before the first change. What the job assumed need not be right for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from penstock.control.changes import Change, Detector, Sensitivity
from penstock.control.events import OpTimes
from penstock.cost import Costs

COMPUTE = "compute"
"""The cause in decisions that slow ops lead to; the others are causes of links."""
_SAME = 0.05
"""A factor this near to 1 counts as 1: the stage is as it was."""

Factors = tuple[tuple[int, str, float], ...]
"""(stage, kind, factor): ops take `factor` times as long as assumed. Ops that are not named take as long as
assumed.
"""


@dataclass(frozen=True)
class ComputeChange:
    """A verified change of how long a stage's ops take.

    Attributes:
        rank: the rank whose ops changed.
        stage: the stage of these ops.
        change: what one op of each kind takes together, before and after, in ms.
        factors: by kind, how many times as long an op takes as before the first change.
        num_iterations: iterations since it began.

    Examples:
        >>> import penstock as ps
        >>> change = ps.control.Change(before=30.0, after=45.0, began=4)
        >>> slow = ps.control.ComputeChange(rank=1, stage=1, change=change, factors={"F": 1.5}, num_iterations=2)
        >>> slow.factors["F"]
        1.5
    """

    rank: int
    stage: int
    change: Change
    factors: Mapping[str, float]
    num_iterations: int

    cause = COMPUTE

    def __str__(self) -> str:
        before, after = self.change.before, self.change.after
        return f"stage {self.stage} on rank {self.rank}: one op of each kind {before:.3g} -> {after:.3g} ms (compute)"


class ComputeWatch:
    """Collects one stage's op times, iteration by iteration."""

    ITERATIONS = 16

    def __init__(self, rank: int, stage: int, least: float, sensitivity: Sensitivity) -> None:
        self.rank, self.stage = rank, stage
        # Ops take more even times than messages: a smaller change means something.
        self.detector = Detector(least, replace(sensitivity, share=sensitivity.share / 2))
        self._now: dict[str, tuple[float, float]] = {}
        self._regime: deque[dict[str, tuple[float, float]]] = deque(maxlen=self.ITERATIONS)
        self._before: dict[str, float] | None = None
        self._factors: dict[str, float] = {}

    @property
    def factors(self) -> Mapping[str, float]:
        """By kind, how many times as long its ops take as before the first change. Kinds that did not
        change are left out.
        """
        return {kind: factor for kind, factor in self._factors.items() if abs(factor - 1) > _SAME}

    @property
    def level(self) -> float | None:
        """The time of one of each kind (ms) since the last verified change."""
        return self.detector.level

    @property
    def latest(self) -> float | None:
        """The time of one of each kind (ms) in the latest iteration."""
        return sum(median(halves) for halves in self._regime[-1].values()) if self._regime else None

    def feed(self, times: OpTimes) -> None:
        self._now |= dict(times.ms)

    def end_iteration(self) -> ComputeChange | None:
        """Takes the times of the iteration together. Returns the change that they verify, if there is one."""
        if not self._now:
            return None
        now, self._now = self._now, {}
        found = None
        for half in (0, 1):
            found = self.detector.feed(sum(halves[half] for halves in now.values())) or found
        self._regime.append(now)
        if found is None:
            return None
        began = min((found.began + 1) // 2, len(self._regime))
        rows = list(self._regime)
        if self._before is None:
            self._before = _levels(rows[:-began] or rows)
        self._factors = {
            kind: level / self._before[kind]
            for kind, level in _levels(rows[-began:]).items()
            if self._before.get(kind, 0.0) > 0
        }
        while len(self._regime) > began:
            self._regime.popleft()
        return ComputeChange(self.rank, self.stage, found, self.factors, began)


def _levels(rows: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """The median of each kind."""
    times: dict[str, list[float]] = {}
    for row in rows:
        for kind, halves in row.items():
            times.setdefault(kind, []).extend(halves)
    return {kind: median(each) for kind, each in times.items()}


def scaled(costs: Costs, factors: Factors) -> Costs:
    """Costs whose ops take `factors` times as long as assumed. If only B was measured, I and W follow it; if I and W
    were, B follows them.
    """
    if not factors:
        return costs
    rows = {kind: list(row) for kind, row in (("F", costs.f), ("I", costs.i), ("W", costs.w), ("B", costs.b))}
    named = {(stage, kind) for stage, kind, _ in factors}
    for stage, kind, factor in factors:
        if kind in rows:
            rows[kind][stage] *= factor
    for stage in {stage for stage, _, _ in factors}:
        if (stage, "B") not in named and costs.i[stage] + costs.w[stage] > 0:
            rows["B"][stage] *= (rows["I"][stage] + rows["W"][stage]) / (costs.i[stage] + costs.w[stage])
        elif (stage, "B") in named and not {(stage, "I"), (stage, "W")} & named and costs.b[stage] > 0:
            ratio = rows["B"][stage] / costs.b[stage]
            rows["I"][stage] *= ratio
            rows["W"][stage] *= ratio
    return replace(costs, f=rows["F"], i=rows["I"], w=rows["W"], b=rows["B"])
