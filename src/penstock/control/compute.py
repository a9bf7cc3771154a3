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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from penstock.control.changes import USUAL, Change, Detector, Watch
from penstock.control.events import OpTimes
from penstock.cost import Costs

COMPUTE = "compute"
"""The cause in decisions that slow ops lead to; the others are causes of links."""
_SAME = 0.05
"""A factor this near to 1 counts as 1: the stage is as it was."""

_AS_ASSUMED = 0.005
"""Share of its assumed time that an op may differ by and still count as taking just that."""

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
        num_iterations: iterations since it began.
    """

    rank: int
    stage: int
    change: Change
    num_iterations: int

    cause = COMPUTE

    def __str__(self) -> str:
        before, after = self.change.before, self.change.after
        where = f"stage {self.stage} on rank {self.rank}"
        return f"ops of {where} take {after:.3g} ms instead of {before:.3g}, one of each kind together (compute)"


class ComputeWatch(Watch[OpTimes, ComputeChange]):
    """Follows one stage's op times.

    Attributes:
        rank, stage: whose.
        factors: by kind, how many times as long its ops take as before the first change. Kinds that did not change
            are left out.
    """

    def __init__(self, rank: int, stage: int, least: float) -> None:
        # Ops take more even times than messages: a smaller change means something.
        super().__init__(Detector(least, replace(USUAL, share=USUAL.share / 2)))
        self.rank, self.stage = rank, stage
        self.factors: dict[str, float] = {}
        self._before: dict[str, float] | None = None

    @property
    def latest(self) -> float | None:
        """The time of one of each kind (ms) in the latest iteration."""
        return sum(median(halves) for _, halves in self.reports[-1].ms) if self.reports else None

    def _suspect(self, report: OpTimes) -> tuple[Change, int] | None:
        found = None
        for half in (0, 1):
            found = self.detector.feed(sum(halves[half] for _, halves in report.ms)) or found
        return None if found is None else (found, 2)

    def _verified(
        self, change: Change, num_iterations: int, before: Sequence[OpTimes], after: Sequence[OpTimes]
    ) -> ComputeChange:
        if self._before is None:
            self._before = _levels(before)
        known = ((kind, ms, self._before.get(kind, 0.0)) for kind, ms in _levels(after).items())
        factors = {kind: ms / usual for kind, ms, usual in known if usual > 0}
        self.factors = {kind: factor for kind, factor in factors.items() if abs(factor - 1) > _SAME}
        return ComputeChange(self.rank, self.stage, change, num_iterations)


def _levels(reports: Sequence[OpTimes]) -> dict[str, float]:
    """The median of each kind."""
    times: dict[str, list[float]] = {}
    for kind, halves in (each for report in reports for each in report.ms):
        times.setdefault(kind, []).extend(halves)
    return {kind: median(each) for kind, each in times.items()}


def factors_of(ops: Iterable[OpTimes], costs: Costs) -> Factors:
    """How many times as long as the costs say each kind of op took on each stage in one step. Kinds that took as long
    as the costs say are left out.
    """
    found = [
        (each.stage, kind, fmean(halves) / assumed)
        for each in ops
        for kind, halves in each.ms
        if (assumed := _assumed(costs, each.stage, kind)) > 0
    ]
    return tuple(sorted(each for each in found if abs(each[2] - 1) > _AS_ASSUMED and each[2] > 0))


def load_of(ops: Iterable[OpTimes], costs: Costs) -> float | None:
    """How many times as long as the costs say all ops of one step took together; None where none were reported."""
    rows = [(fmean(halves), _assumed(costs, each.stage, kind)) for each in ops for kind, halves in each.ms]
    assumed = sum(usual for _, usual in rows if usual > 0)
    return sum(ms for ms, usual in rows if usual > 0) / assumed if assumed else None


def _assumed(costs: Costs, stage: int, kind: str) -> float:
    """What the costs say that an op takes (ms); 0 for a stage or kind that they do not have."""
    rows = {"F": costs.f, "I": costs.i, "W": costs.w, "B": costs.b}
    return rows[kind][stage] if kind in rows and stage < costs.num_stages else 0.0


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
